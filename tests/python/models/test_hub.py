"""Ids that the hub cache lacks: downloaded where that is allowed, and else a named error."""

from __future__ import annotations

import fnmatch
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import are_progress_bars_disabled

from modelzoo import Pair, read_weights
from specrs import LLM, HubError, ModelFileError, SamplingParams
from specrs.models import locate


class Hub:
    """In place of `snapshot_download`: repositories are folders."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        self.repositories, self.asked, self.quiet = repositories, [], []

    def __call__(self, name: str, *, revision: str, allow_patterns: list[str], cache_dir: Path) -> str:
        self.asked.append(name if revision == "main" else f"{name}@{revision}")
        self.quiet.append(are_progress_bars_disabled())
        if name not in self.repositories:
            raise ConnectionError(f"404 Client Error.\n\nRepository Not Found: {name}")
        folder = Path(cache_dir) / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / "0123abcd"
        for file in self.repositories[name].rglob("*"):
            inner = file.relative_to(self.repositories[name])
            if file.is_file() and any(fnmatch.fnmatch(str(inner), pattern) for pattern in allow_patterns):
                (snapshot / inner).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, snapshot / inner)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / revision).write_text("0123abcd")
        return str(snapshot)


@pytest.fixture
def hub(tiny: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    repository = tmp_path / "repository"
    shutil.copytree(tiny.target, repository)
    (repository / "additional_chat_templates").mkdir()
    names = (
        "chat_template.jinja",
        "additional_chat_templates/rag.jinja",
        "pytorch_model.bin",
        "consolidated.safetensors",
    )
    for name in (*names, "evil.py", "README.md", "onnx.onnx"):
        (repository / name).write_text("x")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    found = Hub({"org/model": repository, "org/head": tiny.draft})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found)
    return found


def test_a_model_and_its_head_are_downloaded_once(hub: Hub, tiny: Pair) -> None:
    params = SamplingParams(max_tokens=8)
    with LLM(tiny.target, tiny.draft, tree=(2, 2, 4)) as llm:
        [want] = llm.generate([[1, 2]], params)
    for _ in range(2):
        with LLM("org/model", "org/head", tree=(2, 2, 4)) as llm:
            [out] = llm.generate([[1, 2]], params)
            assert out.token_ids == want.token_ids and out.rounds == want.rounds
            assert set(llm.chat_templates.templates) == {"default", "rag"}
    assert hub.asked == ["org/model", "org/head"]
    there = {p.name for p in locate("org/model", "model").iterdir()}
    assert not there & {"pytorch_model.bin", "consolidated.safetensors", "evil.py", "onnx.onnx"}


def test_pickled_weights_are_downloaded_where_there_are_no_others(hub: Hub, tiny: Pair, tmp_path: Path) -> None:
    head = tmp_path / "published"
    head.mkdir()
    shutil.copy(tiny.draft / "config.json", head)
    torch.save(read_weights(tiny.draft), head / "pytorch_model.bin")
    (head / "optimizer.bin").write_text("x")
    hub.repositories["org/head"] = head
    for _ in range(2):
        with LLM(tiny.target, "org/head@v1", tree=(2, 2, 4)) as llm:
            assert llm.generate([[1, 2]], SamplingParams(max_tokens=3))[0].rounds > 0
    assert hub.asked == ["org/head@v1", "org/head@0123abcd"]  # the second list of files: of the first's commit
    assert {p.name for p in locate("org/head@v1", "draft").iterdir()} == {"config.json", "pytorch_model.bin"}


@pytest.mark.parametrize("weights", [True, False], ids=["beside weights", "alone"])
def test_an_adapter_of_the_hub_is_seen(weights: bool, hub: Hub, tmp_path: Path) -> None:
    """The configuration of an adapter in the repository comes too, and is refused as in a directory."""
    repository = tmp_path / "tuned"
    if weights:
        shutil.copytree(hub.repositories["org/model"], repository)
    repository.mkdir(exist_ok=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (repository / name).write_bytes(b"{}")
    hub.repositories["org/tuned"] = repository
    where = "beside the weights" if weights else "not a whole model"
    for _ in range(2):
        with pytest.raises(ModelFileError, match=rf"model: an adapter .*\(adapter_config.json\), {where}") as e:
            LLM("org/tuned")
        assert not isinstance(e.value, HubError)
    assert hub.asked == ["org/tuned"]


def test_bars_are_as_asked(hub: Hub, tmp_path: Path) -> None:
    for progress in (None, True, False):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        locate("org/model", "model", progress=progress)
    assert hub.quiet == [True, False, True] and not are_progress_bars_disabled()


def test_an_incomplete_snapshot_is_completed(hub: Hub) -> None:
    directory = locate("org/model", "model")
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    (hub.repositories["org/model"] / "model-1.safetensors").write_text("x")
    (directory / "model-0.safetensors").write_text("x")
    assert (locate("org/model", "model") / "model-1.safetensors").is_file() and len(hub.asked) == 2


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_is_offline(hub: Hub, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "yes")
    with pytest.raises(HubError, match=f"hf download org/model .*It was not downloaded: {variable} = 'yes'"):
        LLM("org/model")
    assert hub.asked == []
    monkeypatch.setenv(variable, "0")
    assert locate("org/model", "model").is_dir()


def test_failures_have_a_name(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HubError, match=r"draft: no such directory.*ConnectionError: 404 Client Error. Repository") as e:
        LLM("org/model", "org/nothing")
    assert isinstance(e.value, ModelFileError) and "\n" not in str(e.value)
    with pytest.raises(HubError, match="no snapshot of 'org/nothing'"):
        locate("org/nothing", "model", download=False)
    assert hub.asked == ["org/model", "org/nothing"]
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "model.gguf", "consolidated.pth"):
        (other / name).write_text("{}")
    hub.repositories["org/old"] = other
    with pytest.raises(
        HubError, match=r"no weights came: the repository has no model.safetensors, no pytorch_model.bin and"
    ):
        LLM("org/old")

    def breaks(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", breaks)
    with pytest.raises(HubError, match=r"OSError: .*No space left on device"):
        LLM("org/other")
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(HubError, match="huggingface_hub is not installed"):
        LLM("org/other")


def test_a_path_is_never_looked_up(hub: Hub, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", "./org/model", "org/model/x", "nowhere"):
        with pytest.raises(ModelFileError, match="no such directory"):
            LLM(path)
    assert hub.asked == []
