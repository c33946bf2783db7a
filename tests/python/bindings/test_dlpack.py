"""Tensors in and out by DLPack: values, lifetimes, and what must be refused."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from dlpack_ctypes import Producer
from specrs import _specrs as core

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}


@pytest.mark.parametrize("name", DTYPES)
def test_torch_round_trip(name: str) -> None:
    source = torch.arange(24).reshape(2, 3, 4).to(DTYPES[name])
    array = core.as_array(source)
    assert (array.shape, array.dtype, len(array)) == ((2, 3, 4), name, 2)
    assert array.tolist() == source.tolist()
    back = torch.from_dlpack(array)
    assert back.dtype == DTYPES[name]
    assert torch.equal(back, source)
    assert torch.equal(torch.utils.dlpack.from_dlpack(array.__dlpack__()), source)  # the legacy capsule


@pytest.mark.parametrize("name", [n for n in DTYPES if n != "bfloat16"])
def test_numpy_round_trip(name: str) -> None:
    source = np.arange(6, dtype=name).reshape(3, 2)
    array = core.as_array(source)
    back = np.from_dlpack(array)
    assert back.dtype == source.dtype
    assert np.array_equal(back, source)


def test_numpy_has_no_bfloat16() -> None:
    array = core.as_array(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises((BufferError, RuntimeError), match="dtype"):  # numpy's own refusal
        np.from_dlpack(array)
    assert array.tolist() == [1.0, 1.0]


def test_arrays_are_producers_for_specrs_too() -> None:
    array = core.as_array(core.as_array(torch.tensor([[1, 2], [3, 4]])))
    assert array.tolist() == [[1, 2], [3, 4]]


def test_export_shares_memory_and_copy_detaches() -> None:
    array = core.as_array(torch.zeros(3, dtype=torch.int32))
    shared = torch.from_dlpack(array)
    copied = torch.utils.dlpack.from_dlpack(array.__dlpack__(max_version=(1, 0), copy=True))
    shared[1] = 7
    assert array.tolist() == [0, 7, 0]
    assert copied.tolist() == [0, 0, 0]


def test_memory_outlives_its_array() -> None:
    array = core.as_array(torch.arange(1000, dtype=torch.int64))
    consumers = [torch.from_dlpack(array), torch.from_dlpack(array), torch.from_numpy(np.from_dlpack(array).copy())]
    alive = weakref.ref(consumers[0])
    del array
    gc.collect()
    _ = [torch.zeros(1000, dtype=torch.int64) for _ in range(100)]  # would reuse freed memory
    assert all(torch.equal(c, torch.arange(1000)) for c in consumers)
    assert alive() is not None


def test_consumers_may_drop_on_other_threads() -> None:
    arrays = [core.as_array(torch.full((64,), i)) for i in range(64)]
    tensors = [torch.from_dlpack(a) for a in arrays]
    del arrays

    def drop(part: list[torch.Tensor]) -> None:
        while part:
            t = part.pop()
            assert int(t[0]) == int(t[63])

    threads = [threading.Thread(target=drop, args=(tensors[i::4],)) for i in range(4)]
    del tensors
    for t in threads:
        t.start()
    for t in threads:
        t.join()


@pytest.mark.parametrize("export", [{}, {"max_version": (1, 3)}, {"max_version": (0, 8)}])
def test_unconsumed_capsules_are_freed(export: dict[str, Any]) -> None:
    array = core.as_array(torch.zeros(1 << 20, dtype=torch.uint8))
    for _ in range(4096):  # 4 GiB if each kept its copy
        array.__dlpack__(copy=True, **export)


def test_export_refuses_what_it_cannot_do() -> None:
    array = core.as_array(torch.zeros(2))
    assert array.__dlpack_device__() == (1, 0)
    array.__dlpack__(stream=None, max_version=(1, 1), dl_device=(1, 0), copy=False)
    with pytest.raises(BufferError, match="stream = 1"):
        array.__dlpack__(stream=1)
    with pytest.raises(BufferError, match=r"\(2, 0\)"):
        array.__dlpack__(dl_device=(2, 0))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 5)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    array = core.as_array(torch.zeros(shape))
    assert array.shape == shape
    assert torch.from_dlpack(array).shape == shape
    assert core.as_array(np.zeros(shape, dtype=np.float32)).tolist() == np.zeros(shape).tolist()


def test_scalars_and_offsets() -> None:
    assert core.as_array(torch.tensor(5)).tolist() == 5
    assert core.as_array(torch.arange(10)[3:7]).tolist() == [3, 4, 5, 6]
    assert core.as_array(np.arange(10)[3:7]).tolist() == [3, 4, 5, 6]
    assert core.as_array(Producer([1.0, 2.0, 3.0], [2], [1], byte_offset=4)).tolist() == [2.0, 3.0]
    with pytest.raises(TypeError, match="0-d"):
        len(core.as_array(torch.tensor(5)))


def test_strides_of_dimensions_of_one_do_not_matter() -> None:
    assert core.as_array(torch.arange(4).reshape(4, 1).as_strided((4, 1), (1, 77))).tolist() == [[0], [1], [2], [3]]
    assert core.as_array(Producer([1.0, 2.0], [1, 2], [99, 1])).tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3).t(),
        torch.zeros(4, 4)[:, :2],
        torch.zeros(1).expand(3),
        np.zeros(8, dtype=np.float32)[::2],
        np.zeros(8, dtype=np.float32)[::-1],
    ],
)
def test_other_strides_are_refused(tensor: Any) -> None:
    with pytest.raises(core.ConfigError, match="contiguous") as e:
        core.as_array(tensor)
    assert e.value.operand == "tensor"
    assert "strides" in e.value.got


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ([1.0], "list"),
        (None, "NoneType"),
        (3, "int"),
        (torch.zeros(2, dtype=torch.float64), "float64"),
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (np.zeros(2, dtype=np.uint16), "uint16"),
        (torch.eye(2).to_sparse(), "cannot be exported"),
        (torch.zeros(2, device="meta"), "cannot be exported"),
        (np.array(["a"]), "cannot be exported"),
    ],
)
def test_what_is_no_tensor_of_ours(value: Any, got: str) -> None:
    with pytest.raises(core.ConfigError) as e:
        core.as_array(value)
    assert e.value.kind == "Mismatch"
    assert got in e.value.got
    assert str(e.value) == f"tensor: got {e.value.got}, want {e.value.want}"


def test_a_producers_refusal_is_the_cause() -> None:
    with pytest.raises(core.ConfigError) as e:
        core.as_array(torch.zeros(2, device="meta"))
    assert isinstance(e.value.__cause__, Exception)


def test_interrupts_pass_through() -> None:
    class Interrupted:
        def __dlpack__(self, **_: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        core.as_array(Interrupted())


def test_older_producers_are_called_without_keywords() -> None:
    class Old:
        def __dlpack__(self, stream: None = None) -> Any:
            return torch.utils.dlpack.to_dlpack(torch.tensor([1, 2]))

    assert core.as_array(Old()).tolist() == [1, 2]


@pytest.mark.parametrize("legacy", [False, True])
def test_the_deleter_runs_once(legacy: bool) -> None:
    producer = Producer([1.0, 2.0], legacy=legacy)
    assert core.as_array(producer).tolist() == [1.0, 2.0]
    assert producer.deleted == 1
    wrong = Producer([1.0, 2.0], legacy=legacy, bits=64)
    with pytest.raises(core.ConfigError, match="float64"):
        core.as_array(wrong)
    assert wrong.deleted == 1


def test_a_capsule_is_consumed_once() -> None:
    producer = Producer([1.0], reuse=True)
    core.as_array(producer)
    with pytest.raises(core.ConfigError, match="consumed before"):
        core.as_array(producer)
    assert producer.deleted == 1


def test_not_a_capsule() -> None:
    class Wrong:
        def __dlpack__(self, **_: Any) -> Any:
            return object()

    with pytest.raises(core.ConfigError, match="object from __dlpack__"):
        core.as_array(Wrong())


def test_another_major_version_is_released_unread() -> None:
    producer = Producer([1.0], major=2)
    with pytest.raises(core.ConfigError, match=r"tensor: got a tensor of DLPack 2\.0, want DLPack 1\.x"):
        core.as_array(producer)
    assert producer.deleted == 1


@pytest.mark.parametrize(
    ("fields", "shape", "strides", "message"),
    [
        ({"ndim": -1}, [1], None, "-1 dimensions"),
        ({"ndim": 9}, [1] * 9, None, "9 dimensions"),
        ({"ndim": 2**31 - 1}, [1], None, "dimensions"),
        ({"data": None}, [1], None, "null pointer"),
        ({"lanes": 4}, [1], None, "float32x4"),
        ({"code": 200}, [1], None, "DLPack type 200"),
        ({"device_type": 2}, [1], None, "cuda:0"),
        ({"device_type": 10}, [1], None, "DLPack device 10"),
        ({"byte_offset": 1}, [1], None, "aligned"),
        ({}, [-1], None, "dimension 0 = -1"),
        ({}, [2**62, 4], None, "a size in memory"),
        ({}, [2**62, 2**62, 0, 5], [0, 0, 0, 0], ""),  # no elements: fine whatever the rest
        ({}, [2, 2], [2**62, 2**62], "strides"),
        ({}, [2**40], [-(2**62)], "strides"),
    ],
)
def test_hostile_descriptions(
    fields: dict[str, Any], shape: list[int], strides: list[int] | None, message: str
) -> None:
    producer = Producer([1.0], shape, strides, **fields)
    if message:
        with pytest.raises(core.ConfigError, match=message):
            core.as_array(producer)
    else:
        assert core.as_array(producer).shape == tuple(shape)
    assert producer.deleted == 1


def test_torch_without_the_c_exchange_api() -> None:
    class Older(torch.Tensor):  # behaves as torch before 2.10: only Python's protocol and to_dlpack
        __dlpack_c_exchange_api__ = None

    x = torch.ones(2, 4).as_subclass(Older)
    out = torch.zeros(2, 4).as_subclass(Older)
    assert core.as_array(x).tolist() == [[1.0] * 4] * 2
    core.rms_norm(x, torch.full((4,), 3.0), 0.0, out)
    assert out.tolist() == [[3.0] * 4] * 2


def test_a_foreign_exchange_api_is_refused_by_its_owner() -> None:
    class Thief:
        __dlpack_c_exchange_api__ = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)

    with pytest.raises(core.ConfigError, match="Thief"):
        core.as_array(Thief())


def test_many_tensor_types() -> None:
    """More types than are remembered."""
    for i in range(100):
        kind = type(f"T{i}", (torch.Tensor,), {})
        assert core.as_array(torch.tensor([i]).as_subclass(kind)).tolist() == [i]


def test_parameters_are_read() -> None:
    assert core.as_array(torch.nn.Parameter(torch.ones(2))).tolist() == [1.0, 1.0]
