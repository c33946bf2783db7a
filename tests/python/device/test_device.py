"""specrs.device where there may be no GPU: imports, refusals and the reason why CUDA is absent."""

import subprocess
import sys

import pytest
import torch

import specrs
from specrs import device


def operands():
    cache = torch.zeros(1, 2, 4, 1, 8)
    slots = torch.zeros(2, dtype=torch.int32)
    return cache, slots, slots.clone(), torch.tensor([0, 2], dtype=torch.int32)


def test_import_loads_neither_torch_nor_libcuda():
    code = (
        "import sys, specrs, specrs.device\n"
        "assert 'torch' not in sys.modules\n"
        "assert not any('libcuda.so' in line for line in open('/proc/self/maps'))\n"
        "print('light')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "light\n", done.stderr


def test_available_and_reason_agree():
    reason = device.cuda_unavailable_reason()
    assert device.cuda_available() == (reason is None)
    if not torch.cuda.is_available():
        assert not device.cuda_available()
        assert reason


@pytest.mark.skipif(device.cuda_available(), reason="a GPU is there")
@pytest.mark.parametrize("call", [device.init, device.check, lambda: device.init(0), lambda: device.check(0)])
def test_without_cuda_every_call_says_why(call):
    with pytest.raises(specrs.CudaError) as e:
        call()
    assert e.value.kind == "CudaUnavailable"
    assert e.value.reason == device.cuda_unavailable_reason()


def test_cpu_tensors_are_refused_by_name():
    with pytest.raises(specrs.ConfigError, match="cache: got a tensor on cpu, want a tensor on a CUDA device") as e:
        device.kv_move(*operands())
    assert e.value.operand == "cache"


def test_a_cache_that_requires_grad_is_refused():
    cache, src, dst, offsets = operands()
    with pytest.raises(specrs.ConfigError, match=r"cache: got a tensor that requires grad, want .*detach\(\)"):
        device.kv_move(cache.requires_grad_(), src, dst, offsets)


def test_what_is_no_tensor_is_refused_by_name():
    cache, src, _, offsets = operands()
    with pytest.raises(specrs.ConfigError, match="dst: got list, want a tensor"):
        device.kv_move(cache, src, [0, 0], offsets)


def test_device_of_another_kind_is_refused():
    with pytest.raises(specrs.ConfigError, match="got cpu, want a CUDA device"):
        device.check(torch.device("cpu"))
