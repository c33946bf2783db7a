"""The end of a round on a GPU against the host's, the ring that tells the host, the loop that it continues."""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import time

import pytest
import torch

import specrs
from specrs import _specrs as core
from specrs import device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

from gpu_world import CUDA, I32_MAX, I32_MIN, handle, neighbour
from operands_world import named
from specrs.operands import RoundFound, SeatLimits, SeatState

PLACES, PATH, POISON = 8, 6, 0x5A5A5A5A
DONE, NAN, UNSOUND, FAULT, ASKED, BUDGET = 1, 2, 4, 8, 16, 32
ORDINAL = torch.cuda.current_device()

pytestmark = pytest.mark.usefixtures("no_fault_is_left")


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def operands(accepts, limits, state):
    """The results of a round, its limits and its state, by name."""
    return {
        "accepts": named(RoundFound, accepts), "limits": named(SeatLimits, limits), "state": named(SeatState, state),
    }  # fmt: skip


class World:
    """Seats with random limits, on the host and on the device, and what the host says their rounds do."""

    def __init__(self, canaries, seed, batch, words, slots=4, found_offset=0):
        self.rng = rng = random.Random(seed)
        self.batch, self.words, self.canaries = batch, words, canaries
        self.ring = core._RoundRing(ORDINAL, slots, batch, words)
        self.slots = torch.from_dlpack(self.ring.tensor())
        assert self.slots.shape == (slots, self.ring.slot_words) and not self.slots.is_cuda
        self.slots[:, 1:] = POISON  # all but the sequence words, which begin as 0
        self.want = self.slots.clone()
        lens = [rng.randrange(1, 1000) for _ in range(batch)]
        self.state = (
            ints(lens),
            ints([rng.randrange(50) for _ in range(batch)]),
            ints([rng.randrange(4) for _ in range(batch)]),
            torch.zeros(batch, dtype=torch.int32),
        )
        self.limits = (
            ints([n + rng.choice([1, 2, 9, 40, 500]) for n in lens]),
            ints([rng.randrange(7) for _ in range(batch)]),
            ints([[rng.choice([-1, 3, 40, 70]) for _ in range(PLACES)] for _ in range(batch)]).view(-1),
            ints([rng.choice([0, 0, 1, PLACES]) for _ in range(batch)]),
        )
        self.control = torch.zeros(4, dtype=torch.int32)
        self.on_state, self.on_limits = tuple(map(canaries.of, self.state)), tuple(map(canaries.of, self.limits))
        self.on_control = canaries.of(self.control)
        self.on_found = canaries.empty(words, dtype=torch.int32, offset=found_offset)
        sizes = (batch + 1, batch * PATH, batch, batch, batch, batch, 3)
        self.on_accepts = tuple(canaries.empty(n, dtype=torch.int32) for n in sizes)
        self.accepts = tuple(torch.empty(n, dtype=torch.int32) for n in sizes)
        self.found = torch.empty(words, dtype=torch.int32)
        self.round = 0

    def verify(self, live, faults=0.02):
        """The results of a round of `live` seats; values behind them are wild."""
        rng, wild = self.rng, [I32_MIN, -1, 0, 5, I32_MAX]
        counts = [rng.randint(1, PATH) for _ in range(live)]
        offsets = [0, *itertools.accumulate(counts)]
        behind = self.batch - live
        tokens = [rng.randrange(80) for _ in range(offsets[-1])]
        roots = [tokens[end - 1] for end in offsets[1:]]
        lens = self.state[0].tolist()
        junk = lambda n: [rng.choice(wild) for _ in range(n)]  # noqa: E731
        values = (
            offsets + [offsets[-1]] * behind,
            tokens + junk(self.batch * PATH - len(tokens)),
            [lens[i] + n for i, n in enumerate(counts)] + junk(behind),
            roots + junk(behind),
            [int(rng.random() < faults) for _ in range(live)] + junk(behind),
            [int(rng.random() < 0.9) for _ in range(live)] + junk(behind),
            [I32_MAX, -1, live],
        )
        for array, value in zip(self.accepts, values, strict=True):
            array.copy_(ints(value))
        self.found.copy_(torch.randint(I32_MIN, I32_MAX, (self.words,), dtype=torch.int32))

    def upload(self):
        for there, here in zip((*self.on_accepts, self.on_found), (*self.accepts, self.found), strict=True):
            there.copy_(here)

    def launch(self, conditional=0):
        core._device_round_end(
            self.ring, **operands(self.on_accepts, self.on_limits, self.on_state), control=self.on_control,
            found=self.on_found, handle=conditional, stream=handle(),
        )  # fmt: skip

    def reference(self, asked=False, recorded=False):
        """The same on the host; what it refused."""
        return core._round_end(
            self.want, **operands(self.accepts, self.limits, self.state), control=self.control, found=self.found,
            looped=False, asked=asked, recorded=recorded,
        )  # fmt: skip

    def check(self):
        """Wait for the round as an engine does, and compare every word of host and device."""
        n, ring = self.round, self.ring
        ring.wait(n, handle())
        row = self.slots[ring.slot(n)]
        assert int(row.view(torch.int64)[ring.time_at // 2]) > 0, "no time of publishing"
        got = self.slots.clone()
        ring.check(n)
        written = [ring.slot(i) for i in range(max(0, n + 1 - ring.slots), n + 1)]
        got[written, ring.time_at : ring.time_at + 2] = 0
        for slot in range(ring.slots):
            wrong = (got[slot] != self.want[slot]).nonzero().view(-1).tolist()
            assert not wrong, f"round {n}, slot {slot}: words {wrong[:8]}: {got[slot][wrong[:8]].tolist()}"
        for name, there, here in zip(("lens", "roots", "depths", "done"), self.on_state, self.state, strict=True):
            assert there.tolist() == here.tolist(), f"round {n}: {name}"
        assert self.on_control.tolist() == self.control.tolist(), f"round {n}: control"
        assert ring.ready(n) and not ring.ready(n + 1)
        self.round += 1
        return int(row[ring.exit])


@pytest.mark.parametrize("batch", [1, 2, 63, 64, 65, 256])
@pytest.mark.parametrize("words", [0, 1, 7, 1024, 20_001])
def test_rounds_are_the_hosts_over_and_over_the_ring(canaries, batch, words):
    for live, offset in ((batch, 0), (batch // 2, 4), (1, 8), (0, 0)):
        world = World(canaries, batch * 31 + live, batch, words, found_offset=offset)
        for _ in range(2 * world.ring.slots + 3):
            world.verify(live)
            world.upload()
            world.launch()
            assert world.reference() == []
            world.check()


def test_a_reader_is_told_what_was_overwritten(canaries):
    world = World(canaries, 3, 2, 5, slots=4)
    for n in range(6):
        world.verify(2)
        world.upload()
        world.launch()
        world.reference()
        world.check()
        # A slot is taken as soon as the round before its next writer has ended.
        for old in range(n + 1):
            if old + world.ring.slots > n + 1:
                assert world.ring.ready(old)
                world.ring.check(old)
                continue
            for ask in (world.ring.ready, world.ring.check, lambda r: world.ring.wait(r, handle())):
                with pytest.raises(specrs.StaleOutputError) as e:
                    ask(old)
                assert e.value.held == old and e.value.current > old
                assert (e.value.current - old) % world.ring.slots == 0
    with pytest.raises(specrs.ConfigError, match="has not ended"):
        world.ring.check(6)


def test_a_round_that_nobody_launched_is_an_error_and_no_hang(canaries):
    world = World(canaries, 4, 3, 9)
    torch.cuda.synchronize()
    started = time.perf_counter()
    with pytest.raises(specrs.ConfigError, match="was not launched"):
        world.ring.wait(0, handle())
    assert time.perf_counter() - started < 5


def test_a_wait_sees_a_round_that_ends_later_and_lets_python_run(canaries):
    world = World(canaries, 5, 3, 9)
    world.verify(3)
    world.upload()
    torch.cuda.synchronize()
    torch.cuda._sleep(600_000_000)  # some 0.3 s of cycles
    world.launch()
    world.reference()
    assert not world.ring.ready(0)
    ticks = []
    stop = threading.Event()

    def count():
        while not stop.is_set():
            ticks.append(None)
            time.sleep(1e-3)

    thread = threading.Thread(target=count)
    thread.start()
    world.ring.wait(0, handle())
    seen = len(ticks)
    stop.set()
    thread.join()
    assert seen > 20, "the wait held the GIL"
    world.check()


def test_the_host_asks_for_an_end(canaries):
    world = World(canaries, 6, 5, 3)
    for asked in (False, True, True, False):
        (world.ring.ask_stop if asked else world.ring.clear_stop)()
        world.verify(5, faults=0)
        world.upload()
        world.launch()
        world.reference(asked=asked)
        assert bool(world.check() & ASKED) == asked


BAD = {
    "offset beyond the tokens": (0, lambda w: w.batch * PATH + 1),
    "negative offset": (0, lambda w: -1),
    "least offset": (0, lambda w: I32_MIN),
    "new length": (2, lambda w: 5000),
    "negative new length": (2, lambda w: I32_MIN),
    "live": (6, lambda w: w.batch + 1),
    "negative live": (6, lambda w: -3),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("batch", [1, 5, 64])
def test_numbers_that_make_no_sense_end_their_seat_and_are_recorded(canaries, what, batch):
    world = World(canaries, 7, batch, 6)
    operand, value = BAD[what]
    world.verify(batch, faults=0)
    # The last of the offsets is changed, so that one seat is wrong.
    world.accepts[operand][-1] = value(world)
    world.upload()
    world.launch()
    refused = world.reference()
    assert len(refused) == 1
    exit = world.check()
    assert exit & FAULT
    # Later rounds report it too, until the host has read it.
    world.verify(batch, faults=0)
    world.upload()
    world.launch()
    world.reference(recorded=True)
    assert world.check() & FAULT
    with pytest.raises(specrs.OutOfBoundsError) as e:
        device.check()
    v = e.value
    assert (v.kernel, v.buffer, v.request, v.index, v.bound) == ("round_end", *refused[0])
    world.verify(batch, faults=0)
    world.upload()
    world.launch()
    assert world.reference() == []
    assert not world.check() & FAULT


@pytest.mark.parametrize("array", ["stop_counts", "lens", "offsets"])
def test_seat_data_that_make_no_sense(canaries, array):
    world = World(canaries, 8, 4, 6)
    world.verify(4, faults=0)
    if array == "offsets":
        offsets = world.accepts[0].tolist()
        world.accepts[0].copy_(ints([*offsets[:4], offsets[3]]))  # the last seat has no token
        name = "offsets (decreasing)"
    else:
        here, there = (
            (world.limits[3], world.on_limits[3]) if array == "stop_counts" else (world.state[0], world.on_state[0])
        )
        here[2] = PLACES + 1 if array == "stop_counts" else -7
        there.copy_(here)
        name = "stop tokens" if array == "stop_counts" else "new lengths (length plus accepted nodes)"
    world.upload()
    world.launch()
    refused = world.reference()
    assert [r[0] for r in refused] == [name]
    assert world.check() & (FAULT | DONE) == FAULT | DONE
    with pytest.raises(specrs.OutOfBoundsError) as e:
        device.check()
    v = e.value
    assert (v.kernel, v.buffer, v.request, v.index, v.bound) == ("round_end", *refused[0])


def test_views_of_one_array_and_another_stream(canaries):
    batch, words = 3, 8
    ring = core._RoundRing(ORDINAL, 2, batch, words)
    given = canaries.of([10, 20, 30, 1, 2, 3, 2, 2, 2, 0, 0, 0, 15, 99, 99, 4, 4, 4, 7, 8, 9, 0, 1, 1, 3])
    part = lambda first: given[first : first + batch]  # noqa: E731
    state, limits = tuple(part(i) for i in (0, 3, 6, 9)), tuple(part(i) for i in (12, 15, 18, 21))
    accepts = tuple(canaries.of(v) for v in ([0, 1, 3, 4], [5, 6, 8, 4], [11, 22, 31], [5, 8, 4], [0] * 3, [1] * 3))
    accepts = (*accepts, given[24:])
    control, found = canaries.of([0, 77, 0, 0]), canaries.of(list(range(words)))

    def end(stream, state=state, control=control, found=found):
        named_operands = operands(accepts, limits, state)
        core._device_round_end(ring, **named_operands, control=control, found=found, handle=0, stream=stream)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        end(side.cuda_stream)
        ring.wait(0, side.cuda_stream)
    torch.cuda.synchronize()
    row = torch.from_dlpack(ring.tensor())[0]
    assert row[ring.lens_at :][:batch].tolist() == [10, 20, 30] and row[ring.depths_at :][:batch].tolist() == [2, 2, 2]
    assert row[ring.found_at :][:words].tolist() == list(range(words))
    assert [int(row[i]) for i in (ring.round, ring.live, ring.exit, ring.continues)] == [0, 3, DONE, 0]
    # The second seat drew its stop token 8; the first has 3 levels left before its limit.
    assert [t.tolist() for t in state] == [[11, 20, 31], [5, 2, 4], [3, 0, 4], [0, 1, 0]]
    assert control.tolist() == [1, 77, DONE, 0]
    # Operands that the call writes lie apart from the others, and fit the ring.
    with pytest.raises(specrs.ConfigError):
        end(handle(), state=(state[0], *state[:3]))
    with pytest.raises(specrs.ConfigError, match="found"):
        end(handle(), found=found[:4])
    with pytest.raises(specrs.ConfigError, match="control"):
        end(handle(), control=control[:3])


def test_a_ring_lives_as_long_as_its_tensor():
    ring = core._RoundRing(ORDINAL, 2, 1, 100)
    tensor = torch.from_dlpack(ring.tensor())
    tensor.fill_(5)
    del ring
    core._device_collect(ORDINAL)
    assert bool((tensor == 5).all())


@pytest.mark.parametrize("arguments", [(3, 1, 1), (1, 1, 1), (4, 0, 1), (4, 1, -1), (4, 1, 2**40), (2**17, 1, 1)])
def test_rings_that_cannot_be(arguments):
    with pytest.raises(specrs.ConfigError, match="ring"):
        core._RoundRing(ORDINAL, *arguments)


def test_rounds_of_a_graph_are_read_while_it_runs_on(canaries):
    """Replays follow one another without a synchronisation; under a neighbour, blocks end in another order."""
    batch, words, slots = 65, 20_000, 16
    world = World(canaries, 9, batch, words, slots=slots)
    world.verify(batch, faults=0)
    world.on_limits[0].fill_(I32_MAX)
    world.on_limits[3].zero_()
    world.upload()
    counts = world.accepts[0].diff().to(CUDA)
    found = world.on_found
    found.zero_()

    def one():
        torch.add(world.on_state[0], counts, out=world.on_accepts[2])
        found.add_(1)  # a round tells itself from all others in every word
        world.launch()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        one()
        world.ring.wait(0, handle())
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        one()
    first = int(world.state[0][0])
    step = int(counts[0])
    with neighbour(), torch.cuda.stream(side):
        launched, rounds = 1, 400
        for n in range(1, rounds):
            while launched < min(rounds, n + slots - 1):
                graph.replay()
                launched += 1
            world.ring.wait(n, handle())
            row = world.slots[world.ring.slot(n)].clone()
            world.ring.check(n)
            assert int(row[world.ring.round]) == n
            assert int(row[world.ring.lens_at]) == first + n * step
            body = row[world.ring.found_at :][:words]
            assert int(body.min()) == int(body.max()) == n + 1, "a slot holds words of two rounds"
    torch.cuda.synchronize()
    assert world.on_control.tolist()[0] == rounds and world.on_control.tolist()[3] == 0


# --- the loop --------------------------------------------------------------------------------------------------------


class While:
    """A graph whose one node repeats what `body` puts on the stream, made by the driver's own calls."""

    def __init__(self, body):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        context, graph, conditional = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        self.call("cuGraphCreate", ctypes.byref(graph), ctypes.c_uint(0))
        # Default 1, assigned at each launch (CU_GRAPH_COND_ASSIGN_DEFAULT).
        self.call(
            "cuGraphConditionalHandleCreate", ctypes.byref(conditional), graph, context, ctypes.c_uint(1),
            ctypes.c_uint(1),
        )  # fmt: skip
        # CUgraphNodeParams: type, padding; of a conditional node handle, type and graphs, their array, context.
        words = (ctypes.c_uint64 * 32)()
        words[0] = 13  # CU_GRAPH_NODE_TYPE_CONDITIONAL
        words[2] = conditional.value
        words[3] = 1 | 1 << 32  # CU_GRAPH_COND_TYPE_WHILE, one graph
        words[5] = context.value
        node = ctypes.c_void_p()
        self.call("cuGraphAddNode_v2", ctypes.byref(node), graph, None, None, ctypes.c_size_t(0), ctypes.byref(words))
        inner = ctypes.cast(words[4], ctypes.POINTER(ctypes.c_void_p))[0]
        side = self.side = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            raw = ctypes.c_void_p(side.cuda_stream)
            self.call(
                "cuStreamBeginCaptureToGraph", raw, ctypes.c_void_p(inner), None, None, ctypes.c_size_t(0),
                ctypes.c_int(1),
            )  # fmt: skip
            body(conditional.value)
            ended = ctypes.c_void_p()
            self.call("cuStreamEndCapture", raw, ctypes.byref(ended))
        self.exec = ctypes.c_void_p()
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(self.exec), graph, ctypes.c_ulonglong(0))

    def call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        assert code == 0, f"{name}: error {code}"

    def launch(self):
        self.call("cuGraphLaunch", self.exec, ctypes.c_void_p(self.side.cuda_stream))


def test_a_loop_runs_until_there_is_a_reason_to_leave(canaries):
    batch, words, slots = 3, 40, 32
    core._device_round_end_load(ORDINAL)
    world = World(canaries, 10, batch, words, slots=slots)
    ones = canaries.of([1] * batch)
    lens = world.on_state[0]
    values = ([0, 1, 2, 3], [5, 6, 7], [0, 0, 0], [5, 6, 7], [0] * 3, [1] * 3, [3])
    accepts = (canaries.of(values[0]), canaries.of(values[1]), *(canaries.of(v) for v in values[2:]))
    limits = (canaries.of([1000, 1000, 1000]), canaries.of([4, 4, 4]), canaries.of([-1] * 24), canaries.of([0] * 3))
    for there, value in zip(world.on_state, ([10, 20, 30], [1, 2, 3], [4, 4, 4], [0, 0, 0]), strict=True):
        there.copy_(ints(value))

    def body(conditional):
        torch.add(lens, ones, out=accepts[2])
        core._device_round_end(
            world.ring, **operands(accepts, limits, world.on_state), control=world.on_control, found=world.on_found,
            handle=conditional, stream=handle(),
        )  # fmt: skip

    loop = While(body)
    n = 0

    def run(budget, rounds, exit):
        """A launch of at most `budget` rounds has so many, and the last one this reason."""
        nonlocal n
        torch.cuda.synchronize()  # makes the test's writes on its own stream visible
        with torch.cuda.stream(loop.side):
            world.on_control[1:2].fill_(budget)
            loop.launch()
            for i in range(rounds):
                world.ring.wait(n, loop.side.cuda_stream)
                row = world.slots[world.ring.slot(n)].clone()
                world.ring.check(n)
                last = i == rounds - 1
                told = [int(row[at]) for at in (world.ring.round, world.ring.exit, world.ring.continues)]
                assert told == [n, exit if last else 0, 0 if last else 1], f"round {i} of the launch"
                n += 1
        loop.side.synchronize()
        assert world.on_control.tolist() == [n, max(budget - rounds, 0), exit, 0]

    run(5, 5, BUDGET)
    run(1, 1, BUDGET)
    run(20, 20, BUDGET)
    assert lens.tolist() == [36, 46, 56]
    world.ring.ask_stop()
    run(9, 1, ASKED)
    world.ring.clear_stop()
    limits[0][1] = 47 + 4  # the second seat has three tokens left before the one that ends it
    run(9, 4, DONE)
    assert lens.tolist() == [41, 50, 60 + 1] and world.on_state[3].tolist() == [0, 1, 0]
    # A seat that is done ends every later launch after one round, and stays as it is.
    run(9, 1, DONE)
    assert lens.tolist() == [42, 50, 62]
    world.on_state[3].zero_()
    limits[0][1] = 1000
    accepts[4][2] = 1
    run(9, 1, DONE | NAN)
    world.on_state[3].zero_()
    accepts[4][2] = 0
    world.on_state[2].fill_(4)
    accepts[5][0] = 0
    run(9, 1, UNSOUND)
    accepts[5][0] = 1
    accepts[0][1] = 77
    run(9, 1, DONE | FAULT)
    with pytest.raises(specrs.OutOfBoundsError) as e:
        device.check()
    assert e.value.kernel == "round_end"
