"""The KV move kernel on a GPU against a host that executes the moves one by one. Every comparison is of bits."""

import itertools
import random
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import specrs
from specrs import _specrs as core
from specrs import device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

CUDA = torch.device("cuda", torch.cuda.current_device())
I32_MIN, I32_MAX = -(2**31), 2**31 - 1

# layers, slots, heads, head_dim, dtype: the last column is the kernel's vector width in bytes
CACHES = [
    pytest.param(2, 130, 8, 128, torch.bfloat16, id="bf16-128-v16"),
    pytest.param(3, 131, 2, 64, torch.float32, id="f32-64-v16"),
    pytest.param(32, 130, 8, 128, torch.bfloat16, id="llama-8b-v16"),
    pytest.param(1, 133, 5, 64, torch.float16, id="f16-64-v16"),
    pytest.param(2, 130, 1, 12, torch.bfloat16, id="row-24B-v8"),
    pytest.param(3, 130, 1, 3, torch.float32, id="row-12B-v4"),
    pytest.param(2, 130, 1, 7, torch.bfloat16, id="row-14B-v2"),
    pytest.param(2, 130, 3, 5, torch.uint8, id="row-15B-v1"),
    pytest.param(1, 130, 1, 1, torch.float64, id="row-8B-f64"),
]

pytestmark = pytest.mark.usefixtures("no_fault_is_left")


def random_cache(layers, slots, heads, dim, dtype, seed=0):
    """Random bits, NaNs included: a move copies bits, whatever they mean."""
    bytes_ = torch.empty(0, dtype=dtype).element_size()
    g = torch.Generator(device=CUDA).manual_seed(seed)
    raw = torch.randint(
        0, 256, (layers * 2 * slots * heads * dim * bytes_,), dtype=torch.uint8, device=CUDA, generator=g
    )
    return raw.view(dtype).view(layers, 2, slots, heads, dim)


def bits(cache):
    return cache.contiguous().view(torch.uint8).cpu()


def host(before, src, dst, offsets):
    """The moves one after the other, request after request; returns the bits expected."""
    slots = before.shape[2]
    out = before.cpu().clone()
    for begin, end in itertools.pairwise(offsets):
        for s, d in zip(src[begin:end], dst[begin:end], strict=True):
            if 0 <= s < slots and 0 < d < slots:
                out[:, :, d] = out[:, :, s].clone()
    return bits(out)


def on_gpu(src, dst, offsets):
    return tuple(torch.tensor(v, dtype=torch.int32, device=CUDA) for v in (src, dst, offsets))


def check_moves(cache, src, dst, offsets):
    want = host(cache, src, dst, offsets)
    device.kv_move(cache, *on_gpu(src, dst, offsets))
    assert torch.equal(bits(cache), want)


def random_moves(rng, slots, counts, gap=0):
    """Moves that overlap at will within a request; each request draws from slots of its own."""
    own = list(range(1, slots))
    rng.shuffle(own)
    share = max(2, len(own) // max(1, len(counts)))
    src, dst, offsets = [], [], [0]
    for i, n in enumerate(counts):
        mine = own[i * share : (i + 1) * share][: max(2, n)]  # few slots: many overlaps
        src += [rng.choice(mine) for _ in range(n)]
        dst += [rng.choice(mine) for _ in range(n)]
        offsets.append(len(src))
    return src + [I32_MAX] * gap, dst + [I32_MIN] * gap, offsets


@pytest.mark.parametrize(("layers", "slots", "heads", "dim", "dtype"), CACHES)
def test_random_batches_equal_the_host(layers, slots, heads, dim, dtype):
    rng = random.Random(layers * 1000 + dim)
    for seed, counts in enumerate([[1], [4], [5], [3, 0, 7], [0, 0, 2], [13, 1, 4, 8], [1] * 16, [17]]):
        cache = random_cache(layers, slots, heads, dim, dtype, seed)
        # Moves beyond the last request hold garbage and must not be read.
        check_moves(cache, *random_moves(rng, slots, counts, gap=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_planned_moves_equal_the_host_kernel(head_dim, dtype):
    """The same `Moves`, rings and sink sources included, by the CPU kernel of specrs and by the GPU's."""
    rng, slots, scratch = random.Random(head_dim), 96, 95
    for seed, n in enumerate([0, 1, 2, 5, 16, 40, 94]):
        cache = random_cache(3, slots, 2, head_dim, dtype, seed)
        dst = rng.sample(range(1, scratch), n)
        # Half of them a permutation (so rings), half from anywhere.
        src = rng.sample(dst, n) if seed % 2 else [rng.randrange(scratch) for _ in range(n)]
        moves = core.Moves(src, dst, slots, scratch)
        want = cache.cpu()
        core.kv_move(core.KvCache(want, 16), moves)
        on_device = [torch.from_dlpack(m).to(CUDA) for m in (moves.src, moves.dst)]
        device.kv_move(cache, *on_device, torch.tensor([0, len(moves)], dtype=torch.int32, device=CUDA))
        assert torch.equal(bits(cache), bits(want))


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_cache_at_an_address_of_any_alignment(offset):
    flat = random_cache(1, 41, 2, 64, torch.bfloat16).view(-1)
    cache = flat[offset : offset + 2 * 40 * 128].view(1, 2, 40, 2, 64)
    assert cache.data_ptr() % 16 == offset * 2 % 16
    check_moves(cache, [3, 4, 5, 3], [4, 5, 6, 39], [0, 4])


@pytest.mark.parametrize("n", range(1, 14))
@pytest.mark.parametrize("kind", ["left", "right", "rotate", "fan_out", "fan_in", "ping_pong", "self"])
def test_overlaps_are_executed_in_order(kind, n):
    src, dst = {
        "left": (range(2, n + 2), range(1, n + 1)),  # a source is the next move's destination
        "right": (range(1, n + 1), range(2, n + 2)),  # a destination is the next move's source: slot 1 goes everywhere
        "rotate": ([1, *range(2, n + 1), 30], [30, *range(1, n), n]),  # through slot 30
        "fan_out": ([5] * n, range(6, 6 + n)),
        "fan_in": (range(6, 6 + n), [5] * n),  # the last one wins
        "ping_pong": ([1 + i % 2 for i in range(n)], [2 - i % 2 for i in range(n)]),
        "self": (range(1, n + 1), range(1, n + 1)),
    }[kind]
    src, dst = list(src), list(dst)
    cache = random_cache(2, 32, 2, 64, torch.float32, seed=n)
    check_moves(cache, src, dst, [0, len(src)])


def test_every_byte_of_a_destination_is_written():
    cache = random_cache(4, 64, 8, 128, torch.bfloat16)
    cache[:, :, 1:32] = 1.5
    cache[:, :, 32:] = float("nan")
    n = 31
    device.kv_move(cache, *on_gpu(range(1, 32), range(32, 63), [0, n]))
    assert torch.equal(cache[:, :, 32:63], torch.full_like(cache[:, :, 32:63], 1.5))
    assert cache[:, :, 63].isnan().all()


def test_padding_moves_touch_nothing():
    cache = random_cache(2, 16, 2, 64, torch.bfloat16)
    want = host(cache, [9, 3], [3, 4], [0, 2])
    # Destination 0 between real moves; nothing may be taken for a forwarded value of the sink either.
    device.kv_move(cache, *on_gpu([0, 7, 9, 0, 3], [0, 0, 3, 0, 4], [0, 5]))
    assert torch.equal(bits(cache), want)
    want = host(cache, [0], [5], [0, 1])
    device.kv_move(cache, *on_gpu([7, 0], [0, 5], [0, 2]))
    assert torch.equal(bits(cache), want)


def test_dead_rows_and_stale_moves_of_a_static_batch():
    cache = random_cache(2, 64, 2, 64, torch.bfloat16)
    want = host(cache, [5, 6, 7], [1, 2, 3], [0, 2, 3])
    # Requests 1 and 3.. are dead; moves outside the live ranges hold stale and wild slots.
    src = [5, 6, 7, 9, I32_MAX, -4]
    dst = [1, 2, 3, 8, 12, 70]
    device.kv_move(cache, *on_gpu(src, dst, [0, 2, 2, 3, 3, 3]))
    assert torch.equal(bits(cache), want)


def test_empty_batches_launch_nothing():
    cache = random_cache(1, 8, 1, 64, torch.float32)
    before = bits(cache)
    device.kv_move(cache, *on_gpu([3], [4], [0]))  # no request
    device.kv_move(cache, *on_gpu([], [], [0, 0, 0]))  # no capacity
    device.kv_move(cache, *on_gpu([3], [4], [1, 1]))  # no move
    assert torch.equal(bits(cache), before)


def test_largest_batch():
    """More requests than a grid has rows (65535): the last ones are reached by striding."""
    cache = random_cache(1, 8, 1, 64, torch.float32)
    requests = 65536
    src, dst = [1, 2, 3], [4, 5, 6]
    offsets = [0] + [1] * (requests - 2) + [2, 3]
    assert len(offsets) == requests + 1
    check_moves(cache, src, dst, offsets)


def test_cache_of_more_than_four_gigabytes():
    """Byte offsets beyond 32 bits."""
    slots = 600_000
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("less than 8 GiB of GPU memory is free")
    cache = torch.zeros(2, 2, slots, 8, 128, dtype=torch.bfloat16, device=CUDA)  # 4.9 GB
    row = torch.rand(2, 2, 8, 128, device=CUDA).bfloat16() + 1
    cache[:, :, slots - 2] = row
    device.kv_move(cache, *on_gpu([slots - 2, slots - 2], [slots - 1, 7], [0, 1, 2]))
    assert torch.equal(cache[:, :, slots - 1], row)
    assert torch.equal(cache[:, :, 7], row)
    assert int(torch.count_nonzero(cache)) == 3 * row.numel()  # and nothing else was written


def guarded_cache(slots=16):
    """A cache with 4 KiB of canary on either side, in one allocation."""
    flat = random_cache(1, 2 * slots + 32, 1, 64, torch.bfloat16, seed=9).view(-1)
    middle = flat[2048 : 2048 + 4 * slots * 64]
    return flat, middle.view(2, 2, slots, 1, 64)


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("bad", [16, 17, -1, -16, I32_MAX, I32_MIN, 2**24])
def test_slot_outside_the_cache_is_skipped_and_recorded(side, bad):
    flat, cache = guarded_cache()
    whole = bits(flat)
    src, dst, offsets = [2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13], [0, 2, 6]
    (src if side == "src" else dst)[4] = bad  # move 2 of request 1
    want = host(cache, src, dst, offsets)
    device.kv_move(cache, *on_gpu(src, dst, offsets))
    torch.cuda.synchronize()
    with pytest.raises(specrs.OutOfBoundsError) as e:
        device.check()
    name = "source" if side == "src" else "destination"
    fields = (e.value.kernel, e.value.buffer, e.value.request, e.value.step, e.value.index, e.value.bound)
    assert fields == ("kv_move", f"cache ({name} slot)", 1, 2, bad, 16)
    assert isinstance(e.value, IndexError)
    device.check()  # reported once
    assert torch.equal(bits(cache), want)  # every other move was done
    after = bits(flat)
    begin, end = 2 * 2048, 2 * 2048 + cache.numel() * 2
    assert torch.equal(after[:begin], whole[:begin])
    assert torch.equal(after[end:], whole[end:])


@pytest.mark.parametrize(
    ("offsets", "buffer", "request_", "index"),
    [
        ([0, 1, 5], "src and dst", 1, 4),
        ([0, 1, I32_MAX], "src and dst", 1, I32_MAX - 1),
        ([-1, 1, 1], "src and dst", 0, -1),
        ([I32_MIN, 1, 1], "src and dst", 0, I32_MIN),
        ([0, 2, 1], "src and dst (offsets decrease)", 1, 1),
        ([2, I32_MIN, I32_MIN], "src and dst (offsets decrease)", 0, I32_MIN),
    ],
)
def test_offsets_outside_the_arrays_skip_their_request(offsets, buffer, request_, index):
    cache = random_cache(2, 16, 1, 64, torch.bfloat16)
    src, dst = [2, 3, 4, 5], [8, 9, 10, 11]
    live = [(b, e) for b, e in itertools.pairwise(offsets) if 0 <= b <= e <= 4]
    want = host(cache, src, dst, [0, *live[0]] if live and live[0][0] == 0 else [0, 0])
    device.kv_move(cache, *on_gpu(src, dst, offsets))
    torch.cuda.synchronize()
    with pytest.raises(specrs.OutOfBoundsError) as e:
        device.check()
    assert (e.value.buffer, e.value.request, e.value.step, e.value.index, e.value.bound) == (
        buffer,
        request_,
        -1,
        index,
        4,
    )
    assert torch.equal(bits(cache), want)


def test_of_several_faults_one_is_kept_and_the_next_epoch_records_again():
    cache = random_cache(2, 16, 1, 64, torch.bfloat16)
    bad = {100 + i for i in range(40)}
    moves = on_gpu(sorted(bad), [1] * 40, list(range(41)))
    for _ in range(3):
        device.kv_move(cache, *moves)
        device.kv_move(cache, *moves)
        torch.cuda.synchronize()
        with pytest.raises(specrs.OutOfBoundsError) as e:
            device.check()
        assert e.value.index in bad
        assert e.value.index == 100 + e.value.request
        device.check()


def test_the_launch_is_on_the_current_stream():
    cache = random_cache(2, 64, 2, 64, torch.bfloat16)
    moves = on_gpu([5], [6], [0, 1])
    want = cache.clone()
    want[:, :, 5] = 3.0
    want[:, :, 6] = 3.0
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    done = torch.cuda.Event()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        cache[:, :, 5] = 3.0
        device.kv_move(cache, *moves)
        done.record()
    torch.cuda.default_stream().synchronize()
    assert not done.query(), "the launch waited, or ran on another stream"
    side.synchronize()
    assert torch.equal(bits(cache), bits(want))


def test_the_stream_can_be_given():
    cache = random_cache(2, 64, 2, 64, torch.bfloat16)
    moves = on_gpu([5], [6], [0, 1])
    before = bits(cache)
    want = host(cache, [5], [6], [0, 1])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
    device.kv_move(cache, *moves, stream=side)
    assert torch.equal(bits(cache), before)  # the default stream reads before the side stream wakes
    side.synchronize()
    assert torch.equal(bits(cache), want)


def test_a_thread_that_has_no_context_may_launch():
    cache = random_cache(2, 16, 2, 64, torch.bfloat16)
    moves = on_gpu([5], [6], [0, 1])
    want = host(cache, [5], [6], [0, 1])
    torch.cuda.synchronize()
    handle = torch.cuda.current_stream().cuda_stream
    errors = []

    def launch():
        try:
            core._device_kv_move(cache, *moves, handle)  # no call of torch before it in this thread
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert not errors
    assert torch.equal(bits(cache), want)


def test_graph_replays_with_new_contents():
    slots, capacity, requests = 64, 24, 6
    rng = random.Random(5)
    cache = random_cache(4, slots, 8, 128, torch.bfloat16)
    src, dst = (torch.zeros(capacity, dtype=torch.int32, device=CUDA) for _ in range(2))
    offsets = torch.zeros(requests + 1, dtype=torch.int32, device=CUDA)
    device.init()
    graph = torch.cuda.CUDAGraph()
    before = bits(cache)
    with torch.cuda.graph(graph):
        device.kv_move(cache, src, dst, offsets)
    assert torch.equal(bits(cache), before)  # captured, not run
    for counts in ([4, 4, 4, 4, 4, 4], [0] * 6, [1, 0, 9, 0, 0, 2], [0, 0, 0, 0, 0, 24], [3] * 6):
        s, d, o = random_moves(rng, slots, counts)
        want = host(cache, s, d, o)
        # Stale moves of the replay before stay where they are.
        src[: len(s)] = torch.tensor(s, dtype=torch.int32)
        dst[: len(d)] = torch.tensor(d, dtype=torch.int32)
        offsets.copy_(torch.tensor(o, dtype=torch.int32))
        graph.replay()
        assert torch.equal(bits(cache), want), counts
    src[0], dst[0] = 1, slots
    offsets.copy_(torch.tensor([0] + [1] * requests, dtype=torch.int32))
    want = bits(cache)
    graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(specrs.OutOfBoundsError) as e:
        device.check()
    assert (e.value.index, e.value.bound, e.value.request) == (slots, slots, 0)
    assert torch.equal(bits(cache), want)


def test_graph_capture_may_be_the_first_use_of_the_device():
    code = """
        import torch
        from specrs import device
        cache = torch.arange(2 * 2 * 8 * 64, dtype=torch.float32, device="cuda").view(2, 2, 8, 1, 64)
        src, dst, offsets = (torch.tensor(v, dtype=torch.int32, device="cuda") for v in ([3], [5], [0, 1]))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            device.kv_move(cache, src, dst, offsets)
        assert not torch.equal(cache[:, :, 5], cache[:, :, 3])
        graph.replay()
        assert torch.equal(cache[:, :, 5], cache[:, :, 3])
        device.check()
        print("captured")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.stdout == "captured\n", done.stderr


def test_operands_that_do_not_fit_are_refused_before_the_launch():
    cache = random_cache(2, 16, 2, 64, torch.bfloat16)
    before = bits(cache)
    src, dst, offsets = on_gpu([1], [2], [0, 1])

    def refused(match, *operands):
        with pytest.raises(specrs.ConfigError, match=match):
            device.kv_move(*operands)

    refused("src: got int64, want int32", cache, src.long(), dst, offsets)
    refused("src: got cpu, want a tensor on cuda:0", cache, src.cpu(), dst, offsets)
    refused("offsets: got cpu, want a tensor on cuda:0", cache, src, dst, offsets.cpu())
    refused("dst: got 2 slots, want 1", cache, src, dst.repeat(2), offsets)
    refused("src: got shape .1, 1., want one dimension", cache, src.view(1, 1), dst, offsets)
    refused("offsets length .* = 0 is outside 1..=65537", cache, src, dst, offsets[:0])
    refused("cache: .*contiguous", cache[:, :, ::2], src, dst, offsets)
    refused("cache: .*stride", cache[:, :1].expand(2, 2, 16, 2, 64), src, dst, offsets)
    refused("cache: got shape", cache[0], src, dst, offsets)
    refused("cache: got shape .*want .layers, 2,", cache[:, :1].contiguous(), src, dst, offsets)
    refused("num_slots = 0", cache[:, :, :0].contiguous(), src, dst, offsets)
    inside = cache.view(-1).view(torch.int32)[:1]
    refused("cache: got memory that src uses too", cache, inside, dst, offsets)
    torch.cuda.synchronize()
    assert torch.equal(bits(cache), before)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(specrs.ConfigError, match="CUDA device = 63 is outside 0"):
        device.init(63)
    assert device.init(0) == device.init(torch.device("cuda:0")) >= 80
