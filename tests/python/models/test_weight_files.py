"""Weights that `torch.save` wrote: the tokens of the same weights as safetensors, and no line of a stranger's code."""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import modelzoo
from modelzoo import Pair, read_weights
from specrs import LLM, SamplingParams
from specrs.models import Checkpoint, ModelFileError, loader, weight_bytes
from specrs.models.weight_files import open_weights

PICKLED = "pytorch_model.bin"


def pickled(source: Path, directory: Path, shards: int = 1, archive: bool = True) -> Path:
    """A copy of a model's directory with its weights as `torch.save` writes them; archive: torch's since 1.6."""
    shutil.copytree(source, directory)
    weights = read_weights(directory)
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    names = sorted(weights)
    weight_map = {}
    for i in range(shards):
        file = PICKLED if shards == 1 else f"pytorch_model-{i + 1:05}-of-{shards:05}.bin"
        held = OrderedDict((name, weights[name]) for name in names[i::shards])
        torch.save(held, directory / file, _use_new_zipfile_serialization=archive)
        weight_map.update(dict.fromkeys(held, file))
    if shards > 1:
        (directory / f"{PICKLED}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.mark.parametrize(("shards", "archive"), [(1, True), (3, True), (1, False)])
def test_tokens_are_those_of_the_same_weights_as_safetensors(
    tiny: Pair, tmp_path: Path, shards: int, archive: bool
) -> None:
    target = pickled(tiny.target, tmp_path / "target", shards, archive)
    head = pickled(tiny.draft, tmp_path / "head", archive=archive)
    params = [SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=1.0, seed=3)]
    with LLM(tiny.target, tiny.draft, tree=(2, 2, 4)) as llm:
        want = llm.generate([[1, 2], [7, 8, 9]], params)
    with LLM(target, head, tree=(2, 2, 4)) as llm:
        got = llm.generate([[1, 2], [7, 8, 9]], params)
    assert [(out.token_ids, out.rounds) for out in got] == [(out.token_ids, out.rounds) for out in want]
    on_disk = sum(file.stat().st_size for file in target.glob("*.bin"))
    assert weight_bytes(target, head, None) == on_disk + (head / PICKLED).stat().st_size


def test_every_tensor_comes_back_as_stored(tmp_path: Path) -> None:
    """In what order its values lie in the file, and whether tensors share them, is the file's affair."""
    base = torch.arange(24, dtype=torch.float32)
    tensors = {
        "turned": base.view(4, 6).t(), "part": base[3:9], "again": base[3:9], "half": base.to(torch.float16),
        "map": torch.tensor([0, 3, 5]), "none": torch.empty(0, 4), "grown": torch.nn.Parameter(base.bfloat16()),
    }  # fmt: skip
    torch.save(tensors, tmp_path / PICKLED)
    weights = Checkpoint(tmp_path)
    assert set(weights) == set(tensors)
    for name, tensor in tensors.items():
        got = weights.load(name)
        assert torch.equal(got, tensor) and got.dtype == tensor.dtype and got.is_contiguous()
        assert weights.shape(name) == tuple(tensor.shape)
    assert [weights.dtype(name) for name in ("half", "map", "grown")] == ["F16", "I64", "BF16"]
    assert weights.same("part", "again") and not weights.same("part", "half")
    assert weights.path("nothing") == tmp_path / PICKLED


def test_safetensors_stand_before_what_torch_saved(tiny: Pair, tmp_path: Path) -> None:
    directory = tmp_path / "both"
    shutil.copytree(tiny.target, directory)
    (directory / PICKLED).write_bytes(b"not read")
    (directory / f"{PICKLED}.index.json").write_text("not read")
    with LLM(directory) as llm:
        assert llm.vocab_size > 0


class Runs:
    """What a pickle can do that anybody loads."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:1].expand(1 << 40)


SAVED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "code": (lambda at: {"a": Runs(at / "ran")}, r"UnpicklingError: .*mkdir"),
    "code behind a tensor": (lambda at: {"a": torch.ones(3), "b": Runs(at / "ran")}, r"UnpicklingError: .*mkdir"),
    "a tensor": (lambda at: torch.ones(3), "holds a Tensor: must map names to tensors"),
    "a list": (lambda at: [torch.ones(3)], "holds a list: must map"),
    "a dictionary within": (lambda at: {"model": {"a": torch.ones(3)}}, "model: a dict: must be a tensor"),
    "a number": (lambda at: {"step": 7}, "step: a int: must be a tensor"),
    "a tensor without a name": (lambda at: {7: torch.ones(3)}, "7: a Tensor: must be a tensor with a name"),
    "more values than bytes": (
        lambda at: {"a": wide(torch.ones(3))},
        r"a: shape \[1099511627776\] of 4398\d+ bytes, st",
    ),
    "a sparse tensor": (lambda at: {"a": torch.eye(3).to_sparse()}, r"a: a torch.sparse_coo tensor .*not read"),
    "a meta tensor": (lambda at: {"a": torch.ones(3, device="meta")}, "a: a torch.strided tensor on meta"),
}


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("what", SAVED)
def test_what_is_no_mapping_of_tensors_is_refused_and_not_run(tmp_path: Path, what: str, archive: bool) -> None:
    make, message = SAVED[what]
    torch.save(make(tmp_path), tmp_path / PICKLED, _use_new_zipfile_serialization=archive)
    with pytest.raises(ModelFileError, match=message) as caught:
        Checkpoint(tmp_path)
    assert caught.value.path == tmp_path / PICKLED and not (tmp_path / "ran").exists()
    assert "weights_only" not in str(caught.value)  # torch says how to run the file's code


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("keep", [0, 4, 300, -1, -2000])
def test_a_cut_file_is_named(tmp_path: Path, keep: int, archive: bool) -> None:
    modelzoo.write_target(tmp_path / "model")
    file = pickled(tmp_path / "model", tmp_path / "pickled", archive=archive) / PICKLED
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match=rf"not a whole file of torch.save.*\({file.stat().st_size} bytes") as e:
        Checkpoint(file.parent)
    assert e.value.path == file and "\n" not in str(e.value)


def test_pointers_and_shards_that_are_not_there_are_named(tiny: Pair, tmp_path: Path) -> None:
    (tmp_path / PICKLED).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n")
    with pytest.raises(ModelFileError, match="a Git LFS pointer"):
        Checkpoint(tmp_path)
    directory = pickled(tiny.target, tmp_path / "shards", 2)
    (directory / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(ModelFileError, match=r"pytorch_model-00002-of-00002.bin: no such file"):
        LLM(directory)
    (directory / f"{PICKLED}.index.json").write_text('{"weight_map": {"a": "../x.bin"}}')
    with pytest.raises(ModelFileError, match="outside the model directory"):
        LLM(directory)
    (directory / f"{PICKLED}.index.json").write_text("[]")
    with pytest.raises(ModelFileError, match="not readable as an index"):
        LLM(directory)


@pytest.mark.parametrize("archive", [True, False])
def test_a_file_that_memory_holds_is_not_read_again(
    tiny: Pair, tmp_path: Path, archive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is mapped is: what was read through a mapping counts as this process's memory."""
    directory = pickled(tiny.target, tmp_path / "target", archive=archive)
    monkeypatch.setattr(loader, "_RENEW", 1)
    weights, opened = Checkpoint(directory), []
    monkeypatch.setattr(loader, "open_weights", lambda *given: opened.append(1) or open_weights(*given))
    for name in weights:
        weights.load(name)
    assert len(opened) == (len(list(weights)) if archive else 1)


def test_a_torch_whose_unpickler_is_not_safe_reads_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / PICKLED)
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu130")
    with pytest.raises(ModelFileError, match=r"torch = 2\.9\.1\+cu130: pickled weights need torch 2\.10"):
        Checkpoint(tmp_path)
