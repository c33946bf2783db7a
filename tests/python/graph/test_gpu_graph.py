"""CUDA graphs that own what they point at: captures, loops, lifetimes, and the runtime of buckets, on a GPU.

Each planted mistake is caught by its guard: a seat without a dead-seat write (SeatError), an output held across two
replays (StaleOutputError), a graph dropped while it replays and a buffer freed by its owner (both kept), a batch above
the bucket (eager, said once), a kernel that overruns its region (OutOfBoundsError), an illegal node
(GraphCaptureError).
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

import specrs
from specrs import _specrs as core
from specrs import device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

from gpu_world import neighbour, same
from specrs import graph as graphs
from specrs.graph import Buffers, GraphRuntime, Region, SeatError

ORDINAL = torch.cuda.current_device()
CUDA = torch.device("cuda", ORDINAL)
LONG = 1_000_000_000  # cycles, about half a second


@pytest.fixture(autouse=True)
def no_fault_no_graph_and_no_memory_is_left() -> Iterator[None]:
    """Fail a test that leaves something behind."""
    device.init(ORDINAL)
    torch.cuda.synchronize()
    graphs.collect(wait=True)
    core._device_collect(ORDINAL)
    before = core._device_memory(ORDINAL)[2:]
    yield
    torch.cuda.synchronize()
    device.check()
    for _ in range(2):  # a graph that was kept may have kept another
        gc.collect()
        destroyed, left = graphs.collect(wait=True)
        assert left == 0, f"{left} graphs are left, {destroyed} were destroyed"
    core._device_collect(ORDINAL)
    assert core._device_memory(ORDINAL)[2:] == before, "(dropped, owned) bytes of specrs's memory differ"


class Kept:
    """An object that a weak reference sees."""


def recorded(stream: torch.cuda.Stream, work: Callable[[], object], *keep: object) -> core._Graph:
    """Record a graph of work on torch's stream, without torch's own capture: it allocates nothing."""

    def inside() -> None:
        with torch.cuda.stream(stream):
            work()

    return core._Graph.capture(ORDINAL, stream.cuda_stream, inside, [stream, *keep])


def usable(stream: torch.cuda.Stream) -> None:
    """The stream runs eager work, and is captured again."""
    x = torch.zeros(3, device=CUDA)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        x.add_(1)
    stream.synchronize()
    assert x.tolist() == [1, 1, 1], "eager work on the stream"
    made = recorded(stream, lambda: x.mul_(4), x)
    assert x.tolist() == [1, 1, 1], "captured work runs at its launch"
    made.launch(stream.cuda_stream)
    stream.synchronize()
    assert x.tolist() == [4, 4, 4], "captured work on the stream"


# -- captures ---------------------------------------------------------------------------------------------------


def test_a_graph_counts_its_nodes_and_its_launches() -> None:
    s, x = torch.cuda.Stream(), torch.zeros(5, device=CUDA)
    torch.cuda.synchronize()
    made = recorded(s, lambda: (x.add_(1), x.mul_(2)), x)
    assert (made.replays, made.nodes) == (0, {"kernel": 2})
    other = torch.cuda.Stream()
    for i in range(1, 4):
        made.launch((s if i % 2 else other).cuda_stream)  # launches of one graph follow each other
        assert made.replays == i
    torch.cuda.synchronize()
    assert x.tolist() == [14.0] * 5  # ((0 + 1) * 2 + 1) * 2 + 1) * 2


def test_an_exception_of_the_work_passes_unchanged() -> None:
    s, x = torch.cuda.Stream(), torch.zeros(5, device=CUDA)
    error = KeyError("mine")

    def work() -> None:
        x.add_(1)
        raise error

    with pytest.raises(KeyError) as e:
        recorded(s, work)
    assert e.value is error
    usable(s)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        core._Graph.loop(ORDINAL, s.cuda_stream, lambda handle: interrupted(), [])
    usable(s)
    torch.cuda.synchronize()
    assert not x.any(), "work that was captured in vain does not run"


def test_an_illegal_call_breaks_the_capture_and_nothing_else() -> None:
    s, x = torch.cuda.Stream(), torch.zeros(5, device=CUDA)
    torch.cuda.synchronize()

    def waits() -> None:
        x.add_(1)
        s.synchronize()

    with pytest.raises(RuntimeError, match=r"captur") as e:  # torch's own
        recorded(s, waits)
    assert not isinstance(e.value, specrs.SpecrsError)
    usable(s)

    def hides() -> None:
        with pytest.raises(RuntimeError):
            waits()

    with pytest.raises(specrs.GraphCaptureError, match="graph capture: cuStreamEndCapture: ") as e2:
        recorded(s, hides)
    broken = e2.value
    assert (broken.call, broken.node, broken.path, broken.kind) == ("cuStreamEndCapture", "", "", "GraphCapture")
    usable(s)


def test_a_stream_that_is_not_joined_breaks_the_capture() -> None:
    s, other, x = torch.cuda.Stream(), torch.cuda.Stream(), torch.zeros(5, device=CUDA)
    torch.cuda.synchronize()

    def forks() -> None:
        x.add_(1)
        other.wait_stream(s)
        with torch.cuda.stream(other):
            x.add_(1)

    with pytest.raises(specrs.GraphCaptureError, match=r"cuStreamEndCapture.*UNJOINED") as e:
        recorded(s, forks)
    assert e.value.call == "cuStreamEndCapture"
    usable(s)
    usable(other)

    def joins() -> None:
        forks()
        s.wait_stream(other)

    made = recorded(s, joins, x, other)
    made.launch(s.cuda_stream)
    torch.cuda.synchronize()
    assert x.tolist() == [2.0] * 5


def test_what_cannot_be_captured_is_refused() -> None:
    s = torch.cuda.Stream()
    with pytest.raises(specrs.GraphCaptureError, match="cuStreamBeginCapture") as e:
        core._Graph.capture(ORDINAL, 0, lambda: None, [])
    assert e.value.call == "cuStreamBeginCapture"
    with pytest.raises(specrs.GraphCaptureError, match="this thread is capturing a graph already"):
        recorded(s, lambda: recorded(torch.cuda.Stream(), lambda: None))
    usable(s)
    made = recorded(s, lambda: None)
    assert made.nodes == {}
    made.launch(s.cuda_stream)
    with pytest.raises(specrs.GraphCaptureError, match="the stream is being captured"):
        recorded(s, lambda: made.launch(s.cuda_stream))
    usable(s)
    for raw, why in [(0, "the graph is null")]:
        with pytest.raises(specrs.GraphCaptureError, match=why):
            recorded(s, lambda raw=raw: core._graph_child(s.cuda_stream, raw))  # type: ignore[misc]
    with pytest.raises(specrs.GraphCaptureError, match="this thread is capturing no graph"):
        core._graph_child(s.cuda_stream, 1)
    usable(s)


def test_threads_capture_one_at_a_time() -> None:
    inside, most, made = 0, 0, []

    def work() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.02)  # others get the GIL, and wait for the turn without it
        inside -= 1

    def run() -> None:
        s, x = torch.cuda.Stream(), torch.zeros(2, device=CUDA)
        for _ in range(5):
            made.append((recorded(s, lambda: (work(), x.add_(1)), x), s, x))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a deadlock between the turn and the GIL"
    assert most == 1 and len(made) == 20
    torch.cuda.synchronize()
    for one, s, _ in made:
        one.launch(s.cuda_stream)
    torch.cuda.synchronize()
    assert all(x.tolist() == [5.0, 5.0] for *_, x in made)


# -- illegal nodes ----------------------------------------------------------------------------------------------

LIBCUDA = ctypes.CDLL("libcuda.so.1")
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)


class HostParams(ctypes.Structure):
    _fields_: ClassVar = [("fn", ctypes.c_void_p), ("data", ctypes.c_void_p)]


class Raw:
    """A graph of the driver's, built by hand."""

    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()
        assert LIBCUDA.cuGraphCreate(ctypes.byref(self.handle), 0) == 0
        self.events: list[torch.cuda.Event] = []

    def __del__(self) -> None:
        LIBCUDA.cuGraphDestroy(self.handle)

    def empty(self) -> Raw:
        assert LIBCUDA.cuGraphAddEmptyNode(ctypes.byref(ctypes.c_void_p()), self.handle, None, ctypes.c_size_t(0)) == 0
        return self

    def host(self) -> Raw:
        params = HostParams(ctypes.cast(HOST_FUNCTION, ctypes.c_void_p), None)
        node = ctypes.c_void_p()
        assert (
            LIBCUDA.cuGraphAddHostNode(ctypes.byref(node), self.handle, None, ctypes.c_size_t(0), ctypes.byref(params))
            == 0
        )
        return self

    def event(self, call: str) -> Raw:
        event = torch.cuda.Event()
        event.record()
        self.events.append(event)
        add = getattr(LIBCUDA, call)
        node = ctypes.c_void_p()
        event_handle = ctypes.c_void_p(event.cuda_event)
        assert add(ctypes.byref(node), self.handle, None, ctypes.c_size_t(0), event_handle) == 0
        return self

    def child(self, inner: Raw) -> Raw:
        node = ctypes.c_void_p()
        add = LIBCUDA.cuGraphAddChildGraphNode
        assert add(ctypes.byref(node), self.handle, None, ctypes.c_size_t(0), inner.handle) == 0
        return self

    @property
    def raw(self) -> int:
        assert self.handle.value is not None
        return self.handle.value


@pytest.mark.parametrize(
    ("make", "node", "path"),
    [
        (lambda: Raw().host(), "host", "body / 0 graph / 0 host"),
        (lambda: Raw().empty().host(), "host", "body / 0 graph / 1 host"),
        (lambda: Raw().event("cuGraphAddEventRecordNode"), "event record", "body / 0 graph / 0 event record"),
        (lambda: Raw().event("cuGraphAddEventWaitNode"), "event wait", "body / 0 graph / 0 event wait"),
        (lambda: Raw().empty().child(Raw().host()), "host", "body / 0 graph / 1 graph / 0 host"),
    ],
)
def test_a_node_that_no_loop_may_hold_is_named(make: Callable[[], Raw], node: str, path: str) -> None:
    s, made = torch.cuda.Stream(), make()
    with pytest.raises(specrs.GraphCaptureError) as e:
        core._Graph.loop(ORDINAL, s.cuda_stream, lambda _: core._graph_child(s.cuda_stream, made.raw), [])
    assert (e.value.node, e.value.path) == (node, path), str(e.value)
    assert f"{node} at {path}: the body of a loop holds" in str(e.value)
    usable(s)
    # Outside of a loop these nodes are what the driver takes.
    top = core._Graph.capture(ORDINAL, s.cuda_stream, lambda: core._graph_child(s.cuda_stream, made.raw), [made])
    assert top.nodes[node] == 1 and top.nodes["graph"] >= 1


def test_a_child_stands_in_order_with_what_is_around_it() -> None:
    s, x = torch.cuda.Stream(), torch.zeros(4, device=CUDA)
    y = torch.ones(4, device=CUDA)
    torch.cuda.synchronize()
    inner = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(inner, stream=s, capture_error_mode="thread_local"):
        x.mul_(10)
        x.add_(y * 3)  # allocates in torch's pool

    def work(inner: torch.cuda.CUDAGraph) -> None:
        x.add_(1)
        core._graph_child(s.cuda_stream, inner.raw_cuda_graph())
        x.mul_(2)
        core._graph_child(s.cuda_stream, inner.raw_cuda_graph())

    made = recorded(s, partial(work, inner), inner, x, y)
    assert made.nodes["graph"] == 2 and made.nodes["kernel"] == 2 + 2 * 3
    pool = weakref.ref(inner)
    del inner
    gc.collect()
    assert pool() is not None, "the graph keeps torch's, whose pool its nodes use"
    for _ in range(3):
        with torch.cuda.stream(s):
            x.zero_()
        made.launch(s.cuda_stream)
    s.synchronize()
    assert x.tolist() == [((0 + 1) * 10 + 3) * 2 * 10 + 3.0] * 4


# -- loops ------------------------------------------------------------------------------------------------------


def test_a_loop_runs_as_often_as_it_is_told() -> None:
    x, left = torch.zeros(4, device=CUDA), torch.zeros(1, dtype=torch.int32, device=CUDA)
    torch.cuda.synchronize()
    made = graphs.loop(lambda: x.add_(1), left, keep=[x])
    nodes = made.nodes
    assert nodes["conditional"] == 1 and nodes["graph"] == 1 and nodes["kernel"] == 2, nodes
    s = torch.cuda.current_stream()
    for rounds, want in [(5, 5), (1, 1), (0, 1), (-7, 1), (1000, 1000), (3, 3)]:
        x.zero_()
        left.fill_(rounds)
        made.launch(s.cuda_stream)
        assert (x.tolist(), left.tolist()) == ([want] * 4, [0]), f"{rounds} rounds"
    assert made.replays == 6


def test_a_loop_ends_where_its_body_says_stop() -> None:
    x, left = torch.zeros(1, device=CUDA), torch.zeros(1, dtype=torch.int32, device=CUDA)
    stop = torch.zeros(1, dtype=torch.int32, device=CUDA)
    torch.cuda.synchronize()

    def work() -> None:
        x.add_(1)
        stop.copy_(x >= 4)

    made = graphs.loop(work, left, stop=stop, keep=[x])
    left.fill_(100)
    made.launch(torch.cuda.current_stream().cuda_stream)
    assert (x.tolist(), left.tolist(), stop.tolist()) == ([4], [96], [1])


def test_operands_of_a_loop_are_checked() -> None:
    left = torch.zeros(1, dtype=torch.int32, device=CUDA)
    s = torch.cuda.Stream()
    for text, call in [
        ("handle = 0", lambda: core._graph_loop_count(0, left, None, s.cuda_stream)),
        ("a condition is set within the body", lambda: core._graph_loop_count(1, left, None, s.cuda_stream)),
        ("left: need 1", lambda: core._graph_loop_count(1, left[:0], None, s.cuda_stream)),
        ("left: got memory that stop uses", lambda: core._graph_loop_count(1, left, left, s.cuda_stream)),
        ("int32", lambda: core._graph_loop_count(1, left.float(), None, s.cuda_stream)),
    ]:
        with pytest.raises(specrs.ConfigError, match=text):
            call()
    usable(s)


# -- lifetimes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["here", "another thread"])
def test_a_graph_dropped_while_it_replays_stays_until_it_is_done(where: str) -> None:
    s, x = torch.cuda.Stream(), torch.zeros(4, device=CUDA)
    torch.cuda.synchronize()
    thing = Kept()
    seen = weakref.ref(thing)
    made = [recorded(s, lambda: (torch.cuda._sleep(LONG), x.add_(1)), x, thing)]
    del thing
    made[0].launch(s.cuda_stream)
    made[0].launch(s.cuda_stream)
    if where == "here":
        made.clear()
    else:
        thread = threading.Thread(target=made.clear)
        thread.start()
        thread.join()
    gc.collect()
    assert graphs.collect() == (0, 1), "the launches are under way"
    assert seen() is not None
    # Others go on meanwhile.
    quick = recorded(torch.cuda.Stream(), lambda: None)
    quick.launch(torch.cuda.current_stream().cuda_stream)
    assert seen() is not None
    assert not s.query(), "the long kernel ended before the test could look; make LONG longer"
    s.synchronize()
    assert x.tolist() == [2.0] * 4
    quick.launch(torch.cuda.current_stream().cuda_stream)  # a launch collects
    assert seen() is None and graphs.collect() == (0, 0)


def test_a_captured_buffer_freed_by_its_owner_is_there_for_the_graph() -> None:
    s, size = torch.cuda.Stream(), 1 << 20
    out = torch.zeros(size, dtype=torch.int32, device=CUDA)
    arena = core._DeviceArena(ORDINAL, [("numbers", "int32", [size])], True)
    numbers = torch.from_dlpack(arena.tensor("numbers", 0))
    numbers.copy_(torch.arange(size, device=CUDA))
    torch.cuda.synchronize()
    made = recorded(s, partial(out.copy_, numbers), out, arena)
    owned = core._device_memory(ORDINAL)[3]
    del numbers, arena
    gc.collect()
    core._device_collect_captured(ORDINAL)
    assert core._device_memory(ORDINAL)[3] == owned, "freed under a graph that reads it"
    others = [core._DeviceArena(ORDINAL, [("other", "int32", [size])], True) for _ in range(20)]
    for other in others:
        other.poison(0)
    torch.cuda.synchronize()
    made.launch(s.cuda_stream)
    s.synchronize()
    assert torch.equal(out, torch.arange(size, dtype=torch.int32, device=CUDA))


def test_a_graph_in_a_cycle_is_collected() -> None:
    class Owner:
        made: core._Graph

    owner, s = Owner(), torch.cuda.Stream()
    owner.made = recorded(s, lambda: torch.cuda._sleep(LONG), owner)
    owner.made.launch(s.cuda_stream)
    seen = weakref.ref(owner)
    del owner
    gc.collect()
    assert seen() is not None and hasattr(seen(), "made"), "emptied by the collector while the device uses it"
    assert not s.query(), "the long kernel ended before the test could look; make LONG longer"
    s.synchronize()
    gc.collect()
    assert seen() is None


def test_a_process_ends_with_graphs_under_way() -> None:
    program = f"""
import torch
from specrs import graph
x = torch.zeros(4, device="cuda")
kept = [graph.capture(lambda: (torch.cuda._sleep({LONG // 4}), x.add_(1)), keep=[x]) for _ in range(4)]
for one in kept:
    one.launch(torch.cuda.current_stream().cuda_stream)
kept[1] = None
del one
print("end", graph.collect()[1])
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300,
                          check=False)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "end 1\n"), done.stderr


def test_a_launch_after_a_fault_of_the_device_raises() -> None:
    program = """
import ctypes, torch, specrs
from specrs import graph
x = torch.zeros(4, device="cuda")
made = graph.capture(lambda: x.add_(1), keep=[x])
wild = torch.tensor([2**40], device="cuda")
try:
    torch.zeros(4, device="cuda")[wild].sum().item()  # an assertion in a kernel: the context is gone
except RuntimeError as e:
    pass
try:
    made.launch(torch.cuda.current_stream().cuda_stream)
except specrs.CudaError as e:
    print("raised", e.call)
del made
print(graph.collect(wait=True))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300,
                          check=False)  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[:1] and lines[0].startswith("raised cu"), (done.stdout, done.stderr)
    assert lines[1:] == ["(0, 1)"], "what cannot be asked stays"


# -- the runtime ------------------------------------------------------------------------------------------------

HIDDEN, VOCAB = 64, 40


class Model(torch.nn.Module):
    """A seat's two rows of scores from its token and its history."""

    def __init__(self) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(1)
        self.embed = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=make))
        self.weight = torch.nn.Parameter(torch.randn(2 * VOCAB, HIDDEN, generator=make))

    def forward(self, tokens: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        x = self.embed[tokens] + torch.nn.functional.silu(history).view(-1, 3, HIDDEN).sum(1)
        return (x @ self.weight.T).view(-1, VOCAB)


REGIONS = [
    Region("tokens", "int32", dead=0),
    Region("history", "float32", (3, HIDDEN), dead=0.5),
    Region("sums", "float32", (3,), role="scratch"),
    Region("scores", "float32", (2, VOCAB), role="output"),
    Region("ends", "int64", (), role="output", more=1),
]


def body_of(model: Model) -> Callable[[Buffers], None]:
    def body(at: Buffers) -> None:
        at["sums"].copy_(at["history"].sum(1))
        at["scores"].copy_(model(at["tokens"], at["history"]))
        ends = at["ends"]
        ends[0].zero_()
        ends[1:].copy_((at["tokens"] + at["sums"].view(-1, 3).sum(1).long()).cumsum(0))

    return body


def seats_of(batch: int, seed: int) -> dict[str, torch.Tensor]:
    make = torch.Generator(device=CUDA).manual_seed(seed)
    return {
        "tokens": torch.randint(VOCAB, (batch,), generator=make, device=CUDA, dtype=torch.int32),
        "history": torch.randn(batch * 3, HIDDEN, generator=make, device=CUDA),
    }


def eager(model: Model, seats: int, batch: int, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The body over plain tensors of `seats` seats, those from `batch` on dead; outputs of the live ones."""
    tensors = {r.name: torch.empty(r.shape(seats), dtype=getattr(torch, r.dtype), device=CUDA) for r in REGIONS}
    for region in REGIONS:
        if region.role == "input":
            tensors[region.name].fill_(region.dead)
            tensors[region.name][: region.rows(batch)].copy_(inputs[region.name])
    with torch.no_grad():
        body_of(model)(Buffers(seats, tensors))
    return {r.name: tensors[r.name][: r.rows(batch) + r.more] for r in REGIONS if r.role == "output"}


@pytest.fixture(scope="module")
def model() -> Model:
    return Model().to(CUDA)


@pytest.mark.parametrize("poison", [True, False])
def test_replays_are_the_eager_bits_over_batches_that_shrink_and_grow(model: Model, poison: bool) -> None:
    buckets, rng, count = [1, 2, 5, 16], random.Random(7), 400 if poison else 4000
    runtime = GraphRuntime(body_of(model), buckets, REGIONS, modules=[model], poison=poison)
    assert runtime.bytes == graphs.graph_bytes(buckets, REGIONS)
    cases = {}
    for batch in range(1, 17):
        bucket = runtime.family.bucket(batch)
        assert bucket is not None
        inputs = [seats_of(batch, seed) for seed in range(3)]
        cases[batch] = [(given, eager(model, bucket, batch, given)) for given in inputs]
    torch.cuda.synchronize()
    held: list[tuple[Any, dict[str, torch.Tensor]]] = []
    memory = None
    with neighbour():
        for i in range(count):
            batch = rng.randrange(1, 17)
            given, want = rng.choice(cases[batch])
            done = runtime.replay(batch, given)
            assert (done.batch, done.generation) == (batch, i + 1)
            held.append((done, want))
            # The last two are there to be read; the one before is refused.
            for old, expected in held[-2:] if i % 7 == 0 else held[-1:]:
                for name, tensor in expected.items():
                    got = old.output(name).tensor()
                    assert same(got, tensor), f"replay {i}, {name}, batch {old.batch} of bucket {old.bucket}"
            if len(held) > 2:
                stale = held.pop(0)[0].output("scores")
                assert not stale.valid
                with pytest.raises(specrs.StaleOutputError) as e:
                    stale.tensor()
                assert (e.value.held, e.value.current) == (i - 1, i + 1)
            if i == 50:
                torch.cuda.synchronize()
                memory = (torch.cuda.memory_allocated(), core._device_memory(ORDINAL)[3])
    del old, got, stale
    torch.cuda.synchronize()
    assert memory is not None and core._device_memory(ORDINAL)[3] == memory[1]
    runtime.close()
    with pytest.raises(specrs.StaleHandleError, match="closed"):
        runtime.replay(1, seats_of(1, 0))


def test_outputs_are_leases(model: Model) -> None:
    runtime = GraphRuntime(body_of(model), [2, 4], REGIONS, modules=[model])
    a, b, c = (seats_of(n, n) for n in (2, 3, 4))
    first = runtime.replay(2, a)
    lease, copied = first.output("scores"), first.output("scores", copy=True)
    want = lease.copy()
    second = runtime.replay(3, b)
    assert lease.valid and same(torch.from_dlpack(lease), want), "double-buffered: the last replay's outputs stand"
    third = runtime.replay(4, c)
    ends = first.output("ends")
    for use in (lease.tensor, lease.copy, lease.check, ends.copy, lambda: torch.from_dlpack(lease)):
        with pytest.raises(specrs.StaleOutputError, match=r"holds replay 1 .* replay 3 has overwritten") as e:
            use()
        assert (e.value.held, e.value.current) == (1, 3)
    assert same(copied.tensor(), want) and copied.valid
    assert second.output("scores").valid and third.output("scores").valid
    with pytest.raises(specrs.ConfigError, match=r"output = 'tokens': the outputs are \['scores', 'ends'\]"):
        third.output("tokens")
    # With one set of outputs the next replay ends them; with three, two may follow.
    for copies in (1, 3):
        other = GraphRuntime(body_of(model), [4], REGIONS, modules=[model], copies=copies)
        leases = [other.replay(2, a).output("scores") for _ in range(copies + 1)]
        assert [x.valid for x in leases] == [False] + [True] * copies


def test_a_batch_above_the_largest_bucket_runs_eagerly_and_says_so_once(model: Model) -> None:
    runtime = GraphRuntime(body_of(model), [1, 3], REGIONS, modules=[model], poison=True)
    given = seats_of(9, 1)
    want = eager(model, 9, 9, given)
    with pytest.warns(RuntimeWarning, match="batch 9 is larger than the largest bucket, 3") as found:
        done = runtime.replay(9, given)
    assert len(found) == 1 and found[0].filename == __file__
    assert (done.bucket, done.generation, runtime.eager_runs) == (None, 0, 1)
    lease = done.output("scores")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runtime.replay(8, seats_of(8, 2))
        for _ in range(3):
            runtime.replay(2, seats_of(2, 3))
    assert runtime.eager_runs == 2
    assert lease.valid and same(lease.tensor(), want["scores"]), "its memory is its own"


def test_inputs_are_checked_before_anything_is_written(model: Model) -> None:
    runtime = GraphRuntime(body_of(model), [4], REGIONS, modules=[model])
    good = seats_of(3, 1)
    lease = runtime.replay(3, good).output("scores")
    want = lease.copy()
    for text, batch, bad in [
        (r"inputs = \['tokens'\]: the input regions are \['history', 'tokens'\]", 3, {"tokens": good["tokens"]}),
        (r"input 'tokens': got int32 \[3\], want int32 \[2\] for 2 seats", 2, good),
        (r"input 'history': got float64 \[9, 64\], want float32", 3, {**good, "history": good["history"].double()}),
        ("batch = 0", 0, good),
    ]:
        with pytest.raises(specrs.ConfigError, match=text):
            runtime.replay(batch, bad)
    # From the host, too.
    runtime.replay(3, {name: tensor.cpu() for name, tensor in good.items()})
    assert lease.valid and same(lease.tensor(), want)


class Claim:
    """Bytes that no tensor of torch would reach."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {"shape": (1,), "typestr": "|u1", "data": (address, False), "version": 3}


def planted(kind: str) -> Callable[[Buffers], None]:
    """A body with one mistake; `x` is its input, `y` its output."""
    beside: dict[int, torch.Tensor] = {}  # made in the first run: a capture cannot

    def body(at: Buffers) -> None:
        x, y = at["x"], at["y"]
        if kind == "unwritten seat":
            y[:-2].copy_(x[:-2])
        elif kind == "unwritten row":
            y.copy_(x)
            y[-1].copy_(at["space"][-1])  # scratch that nobody wrote
        elif kind == "dead seat":
            x[-1].add_(1)
            y.copy_(x)
        elif kind == "dead output":
            y.copy_(x * 0 + 7)
        else:
            y.copy_(x)
        if kind == "overrun" or (kind == "neighbour" and at.seats == 1):
            end = at["space"].data_ptr() + at["space"].numel() * 4
            if end not in beside:
                beside[end] = torch.as_tensor(Claim(end), device=CUDA)
            beside[end].fill_(1)

    return body


@pytest.mark.parametrize(
    ("kind", "batch", "want"),
    [
        ("unwritten seat", 3, ("y", 3, 4)),
        ("unwritten seat", 4, ("y", 3, 4)),
        ("unwritten row", 2, ("y", 3, 4)),
        ("dead seat", 3, ("x", 3, 4)),
        ("dead output", 3, ("y", 3, 4)),
    ],
)
def test_planted_seats_are_found(kind: str, batch: int, want: tuple[str, int, int]) -> None:
    regions = [
        Region("x", "float32", (2, 5), dead=-1),
        Region("space", "float32", (2, 5), role="scratch"),
        Region("y", "float32", (2, 5), dead=-1, role="output"),
    ]
    x = torch.randn(batch * 2, 5, device=CUDA)
    runtime = GraphRuntime(planted(kind), [4], regions, poison=True)
    with pytest.raises(SeatError) as e:
        runtime.replay(batch, {"x": x})
    assert (e.value.region, e.value.seat, e.value.bucket, e.value.batch) == (*want, batch), str(e.value)
    assert "bucket 4" in str(e.value) and f"seat {want[1]}" in str(e.value)
    # Without poison nobody looks; without the mistake nothing is found.
    GraphRuntime(planted(kind), [4], regions, poison=False).replay(batch, {"x": x})
    GraphRuntime(planted("none"), [4], regions, poison=True).replay(batch, {"x": x})


def test_the_environment_turns_poison_on(monkeypatch: pytest.MonkeyPatch) -> None:
    x, space = Region("x", "int32", dead=0), Region("space", "int32", role="scratch")
    regions = [x, space, Region("y", "int32", role="output")]
    for value, on in [("1", True), ("0", False), ("", False)]:
        monkeypatch.setenv("SPECRS_POISON", value)
        assert GraphRuntime(planted("none"), [1], regions).poison is on


def test_a_kernel_that_overruns_its_region_is_found() -> None:
    regions = [
        Region("x", "float32", (5,), dead=0),
        Region("space", "float32", (3,), role="scratch"),
        Region("y", "float32", (5,), role="output"),
    ]
    runtime = GraphRuntime(planted("overrun"), [3], regions, poison=True)
    want = "bucket 3, 2 live seats: behind region 'space': byte 36 of 36"
    with pytest.raises(specrs.OutOfBoundsError, match=want) as e:
        runtime.replay(2, {"x": torch.zeros(10, device=CUDA)})
    assert (e.value.buffer, e.value.index, e.value.bound) == ("space", 36, 36)


def test_a_graph_that_writes_seats_of_a_larger_bucket_is_found() -> None:
    regions = [
        Region("x", "float32", (5,), dead=0),
        Region("space", "float32", (3,), role="scratch"),
        Region("y", "float32", (5,), role="output"),
    ]
    # In the bucket of 1 the byte behind its seat is seat 1 of the larger one.
    runtime = GraphRuntime(planted("neighbour"), [1, 3], regions, poison=True)
    with pytest.raises(SeatError, match="no such seat") as e:
        runtime.replay(1, {"x": torch.zeros(5, device=CUDA)})
    assert (e.value.region, e.value.seat, e.value.bucket) == ("space", 1, 1)


def test_a_runtime_dropped_while_it_replays() -> None:
    def body(at: Buffers) -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda._sleep(LONG)
        at["y"].copy_(at["x"] * 2)

    regions = [Region("x", "float32", (1000,), dead=0), Region("y", "float32", (1000,), role="output")]
    made = [GraphRuntime(body, [4], regions)]
    x = torch.randn(4000, device=CUDA)
    got = made[0].replay(4, {"x": x}).output("y").tensor()  # a view keeps the memory, not the runtime
    owned = core._device_memory(ORDINAL)[3]
    thread = threading.Thread(target=made.clear)
    thread.start()
    thread.join()
    gc.collect()
    core._device_collect(ORDINAL)
    assert graphs.collect()[1] >= 1 and core._device_memory(ORDINAL)[3] == owned
    torch.cuda.synchronize()
    assert same(got, x * 2)


def test_memory_of_runtimes_comes_back(model: Model) -> None:
    sizes = []
    for _ in range(6):
        runtime = GraphRuntime(body_of(model), [1, 8], REGIONS, modules=[model])
        assert runtime.captured_bytes > 0
        runtime.replay(5, seats_of(5, 0))
        del runtime
        gc.collect()
        torch.cuda.synchronize()
        graphs.collect(wait=True)
        gc.collect()
        torch.cuda.empty_cache()
        core._device_collect(ORDINAL)
        sizes.append((core._device_memory(ORDINAL)[3], torch.cuda.memory_reserved()))
    assert sizes[1:] == [sizes[1]] * 5, sizes
    with pytest.raises(specrs.DeviceMemoryError, match="the arena"):
        GraphRuntime(body_of(model), [1 << 34], REGIONS, modules=[model])
