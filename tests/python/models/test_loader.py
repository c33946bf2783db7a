"""Weight files: every way in which they can be broken names the file, and the tensor where one is at fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import modelzoo
from specrs.models import Checkpoint, LlamaModel, ModelConfig, ModelFileError


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
    with pytest.raises(ModelFileError, match="save_file") as caught:
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
        with pytest.raises(ModelFileError, match="not readable as a safetensors index") as caught:
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
