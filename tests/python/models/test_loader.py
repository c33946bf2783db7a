"""Weight files: every way in which they can be broken names the file, and the tensor where one is at fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import modelzoo
from specrs.models import Checkpoint, LlamaModel, ModelConfig, ModelFileError, UnsupportedModelError, ops_for
from specrs.models.loader import _check_finite, _Stored


def check(directory: Path) -> None:
    Checkpoint(directory).check(LlamaModel.shapes(ModelConfig.from_directory(directory)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_come_back_as_stored(tmp_path: Path, dtype: torch.dtype, shards: int) -> None:
    modelzoo.write_target(tmp_path, dtype=dtype, shards=shards)
    check(tmp_path)
    weights = Checkpoint(tmp_path)
    expected = modelzoo.random_weights(LlamaModel.shapes(ModelConfig.from_directory(tmp_path)), 0, dtype)
    for name, tensor in expected.items():
        assert weights.shape(name) == tuple(tensor.shape)
        assert torch.equal(weights.load(name), tensor)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    modelzoo.write_target(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match="truncated") as caught:
        Checkpoint(tmp_path)
    assert caught.value.path == path
    assert str(path.stat().st_size) in str(caught.value)


def test_git_lfs_pointer(tmp_path: Path) -> None:
    modelzoo.write_target(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n")
    with pytest.raises(ModelFileError, match="Git LFS pointer"):
        Checkpoint(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such directory"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(ModelFileError, match="no such file") as caught:
        Checkpoint(tmp_path)
    assert caught.value.path == tmp_path / "model.safetensors"
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"not a whole file of torch\.save") as caught:
        Checkpoint(tmp_path)
    assert caught.value.path == tmp_path / "pytorch_model.bin"


def test_missing_and_broken_shards(tmp_path: Path) -> None:
    modelzoo.write_target(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    whole = index.read_text(encoding="utf-8")
    shard = tmp_path / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()

    shard.unlink()
    with pytest.raises(ModelFileError, match="no such file") as caught:
        Checkpoint(tmp_path)
    assert caught.value.path == shard

    shard.write_bytes(content[:-1])
    with pytest.raises(ModelFileError, match="truncated"):
        Checkpoint(tmp_path)

    shard.write_bytes(content)
    raw = json.loads(whole)
    raw["weight_map"]["model.extra"] = shard.name
    index.write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ModelFileError, match="not in the file") as caught:
        Checkpoint(tmp_path)
    assert (caught.value.path, caught.value.tensor) == (shard, "model.extra")

    raw["weight_map"]["model.extra"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ModelFileError, match="outside the model directory"):
        Checkpoint(tmp_path)

    for broken in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(broken, encoding="utf-8")
        with pytest.raises(ModelFileError, match="not readable as an index") as caught:
            Checkpoint(tmp_path)
        assert caught.value.path == index


def test_missing_tensor(tmp_path: Path) -> None:
    modelzoo.write_target(tmp_path)
    weights = modelzoo.read_weights(tmp_path)
    del weights["model.layers.2.mlp.up_proj.weight"], weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match="missing, as for 1 more") as caught:
        check(tmp_path)
    assert {caught.value.tensor, str(caught.value).split("more: ")[1]} == {
        "model.layers.2.mlp.up_proj.weight",
        "model.norm.weight",
    }


def test_extra_tensor(tmp_path: Path) -> None:
    modelzoo.write_target(tmp_path)
    weights = modelzoo.read_weights(tmp_path)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)  # old exports have it; derived
    save_file(weights, tmp_path / "model.safetensors")
    check(tmp_path)
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(128)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match="no use for it") as caught:
        check(tmp_path)
    assert caught.value.tensor == "model.layers.0.self_attn.q_proj.bias"


def test_wrong_shape_and_dtype(tmp_path: Path) -> None:
    modelzoo.write_target(tmp_path)
    weights = modelzoo.read_weights(tmp_path)
    name = "model.layers.1.self_attn.k_proj.weight"
    good = weights[name]
    weights[name] = good[:, :60].contiguous()
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"shape \[64, 60\], but config.json calls for \[64, 64\]") as caught:
        check(tmp_path)
    assert caught.value.tensor == name
    weights[name] = good.to(torch.int8)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match="dtype I8, need one of F32, F16, BF16"):
        check(tmp_path)


def test_a_head_of_its_own_beside_tied_embeddings(tmp_path: Path) -> None:
    """transformers does not tie what differs; here it is refused, by the key that decides."""
    modelzoo.write_target(tmp_path, tie_word_embeddings=True)
    weights = modelzoo.read_weights(tmp_path)
    table = weights["model.embed_tokens.weight"]

    def load(head: torch.Tensor) -> None:
        save_file({**weights, "lm_head.weight": head.contiguous()}, tmp_path / "model.safetensors")
        LlamaModel.load(tmp_path, ops_for())

    load(table.clone())
    other = table.clone()
    other[-1, -1] += 1
    for head in (other, table[:200].clone(), table.bfloat16()):
        with pytest.raises(UnsupportedModelError, match=r"has another lm_head\.weight than") as caught:
            load(head)
        assert caught.value.what == "tie_word_embeddings"
    modelzoo.edit_config(tmp_path, tie_word_embeddings=False)
    load(other)


# -- memory ------------------------------------------------------------------------------------------------------------

MIB = 1 << 20
LOAD = """
import os, resource, sys
import torch
from safetensors import safe_open
from specrs.models import Checkpoint
directory, how = sys.argv[1:]
def vm(): return int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
def peak():  # ru_maxrss would begin with that of the process that forked this one
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10
torch.zeros(8).sum()
before, names = peak(), [f"t{i:02}" for i in range(12)]
if how == "limited":
    resource.setrlimit(resource.RLIMIT_AS, (vm() + (450 << 20),) * 2)
if how == "whole":  # the control: as one would write it
    found = [f for f in sorted(os.listdir(directory)) if f.endswith(".safetensors")]
    files = [safe_open(os.path.join(directory, f), "pt") for f in found]
    for f in files:
        for name in f.keys(): f.get_tensor(name).sum()
else:
    weights = Checkpoint(directory)
    for name in names: weights.load(name).sum()
print((peak() - before) >> 20)
"""


def sparse(path: Path, names: list[str], size: int) -> None:
    """Tensors of zeros that take no room on the disk."""
    header = {n: {"dtype": "F32", "shape": [size // 4], "data_offsets": [i * size, (i + 1) * size]}
              for i, n in enumerate(names)}  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size * len(names))


def loaded(directory: Path, how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", LOAD, str(directory), how], capture_output=True, text=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("shards", [1, 6])
def test_peak_memory_is_near_a_shard_or_less_and_never_the_model(tmp_path: Path, shards: int) -> None:
    names, each = [f"t{i:02}" for i in range(12)], 12 // shards  # 64 MiB each, 768 MiB in all
    for i in range(shards):
        sparse(tmp_path / f"s{i}.safetensors", names[i * each : (i + 1) * each], 64 * MIB)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {n: f"s{i // each}.safetensors" for i, n in enumerate(names)}})
    )
    whole = int(loaded(tmp_path, "whole").stdout)
    assert whole > 700, "the control holds the whole model"
    assert int(loaded(tmp_path, "plain").stdout) < (450 if shards == 1 else 230)
    if shards > 1:  # room for some shards of 128 MiB, each mapped twice, and far from all
        assert loaded(tmp_path, "limited").returncode == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_are_not_finite_are_told_by_file_name_and_place(value: float, dtype: torch.dtype) -> None:
    stored = _Stored(Path("x.safetensors"), "model.norm.weight", (3, 5), "F32")
    weight = torch.arange(15, dtype=dtype).view(3, 5)
    _check_finite(weight, stored)
    _check_finite(weight[:0], stored)
    weight[2, 1] = value
    with pytest.raises(ModelFileError, match=rf"x.safetensors: tensor model.norm.weight: 1 of 15 .* {value} at \[2, 1"):
        _check_finite(weight, stored)
    with pytest.raises(ModelFileError, match="NaN or infinite as float16, first inf at"):
        _check_finite(torch.tensor([1.0, 1e5]).to(torch.float16), stored)
