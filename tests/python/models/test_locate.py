"""Forms in which a model or a draft head is given: directories, hub ids, and things that are neither."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import specrs
from modelzoo import Pair
from specrs import LLM, ConfigError, HubError, ModelFileError, SamplingParams
from specrs.cli import main
from specrs.models.locate import hub_cache, locate


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache."""
    for name in ("HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put(cache: Path, name: str, source: Path, revision: str = "0123abcd") -> Path:
    """A snapshot as huggingface_hub lays it out: files are links to blobs."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    for file in source.iterdir():
        blob = folder / "blobs" / f"{abs(hash(file.name)):x}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(blob)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    return snapshot


def test_a_hub_id_is_its_cached_snapshot(tiny: Pair, cache: Path) -> None:
    put(cache, "some-org/some.model", tiny.target)
    put(cache, "some-org/its-head", tiny.draft)
    params = SamplingParams(max_tokens=12)
    [out] = LLM("some-org/some.model", "some-org/its-head", tree=(2, 2, 4)).generate([[1, 2]], params)
    [want] = LLM(tiny.target, tiny.draft, tree=(2, 2, 4)).generate([[1, 2]], params)
    assert out.token_ids == want.token_ids and out.rounds == want.rounds > 0


def test_a_revision_is_a_branch_a_tag_or_a_commit(tiny: Pair, cache: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    old, new = put(cache, "org/model", tiny.target, commit), put(cache, "org/head", tiny.draft, "f" * 40)
    refs = cache / "models--org--model" / "refs"
    (refs / "pr").mkdir()
    for name in ("v1.0", "pr/1"):
        (refs / name).write_text(commit)
    for name in ("org/model", "org/model@main", "org/model@v1.0", "org/model@pr/1", f"org/model@{commit}"):
        assert locate(name, "model") == old
    assert locate(f"org/head@{'f' * 40}", "draft") == new
    with pytest.raises(ModelFileError, match=r"no snapshot of 'org/model@v2'.*hf download org/model --revision v2 --l"):
        locate("org/model@v2", "model")
    with pytest.raises(ModelFileError, match=r"no whole snapshot of 'org/model@ffff"):
        locate(f"org/model@{'f' * 40}", "model")
    (cache / "models--org--model" / "v3").write_text(commit)
    for name in ("org/model@", "org/model@../v3", "org/model@pr/../main", "org/model@/main", "org/model@a\nb"):
        with pytest.raises(ModelFileError, match="no such directory; give a Hugging Face model directory"):
            locate(name, "model")


def test_a_directory_of_that_name_has_precedence(tiny: Pair, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.target.parent)
    put(cache, "a/b", tiny.draft)
    (cache / "a").mkdir()
    (cache / "a" / "b").symlink_to(tiny.target)
    monkeypatch.chdir(cache)
    assert locate("a/b", "model") == Path("a/b")


def test_an_id_that_is_not_there_comes_with_the_command(cache: Path) -> None:
    with pytest.raises(ModelFileError, match="hf download meta/Llama-9 --local-dir Llama-9") as e:
        LLM("meta/Llama-9")
    assert "model: no such directory" in str(e.value) and str(cache) in str(e.value)
    with pytest.raises(ModelFileError, match=r"draft: no such directory.*hf download org/head --local-dir head"):
        LLM(draft="org/head")


def test_an_incomplete_snapshot_and_a_strange_revision(tiny: Pair, cache: Path) -> None:
    snapshot = put(cache, "org/model", tiny.target)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"no whole snapshot of 'org/model'.*hf download org/model"):
        LLM("org/model")
    refs = cache / "models--org--model" / "refs" / "main"
    refs.write_text("../../../../..")
    with pytest.raises(ModelFileError, match="no whole snapshot"):
        LLM("org/model")
    refs.write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match="no snapshot of"):
        LLM("org/model")
    with pytest.raises(ModelFileError, match=r"a folder of the hub cache; give 'org/model'"):
        LLM(cache / "models--org--model")


@pytest.mark.parametrize("revision", ["", ".", "..", "../snapshots", "/"])
def test_a_revision_is_a_name(revision: str, tiny: Pair, cache: Path) -> None:
    """A revision leads nowhere but into its own folder, even if a model lies where it would lead."""
    snapshot = put(cache, "org/model", tiny.target)
    for place in (snapshot.parent, snapshot.parent.parent):
        shutil.copytree(tiny.target, place, dirs_exist_ok=True)
    (cache / "models--org--model" / "refs" / "main").write_text(revision)
    with pytest.raises(ModelFileError, match="no whole snapshot"):
        LLM("org/model")


def test_no_path_is_not_the_folder_that_the_process_stands_in(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.target)
    with pytest.raises(ModelFileError, match="model = '': no path; give a Hugging Face model directory"):
        LLM("")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    names = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
    for name, value in zip(names, ("/a", "/b", "/c", "/d"), strict=True):
        monkeypatch.setenv(name, value)
    for name in names:
        found.append(str(hub_cache()))
        monkeypatch.delenv(name)
    assert found == ["/a", "/b", "/c/hub", "/d/huggingface/hub"]
    assert hub_cache() == Path("~/.cache/huggingface/hub").expanduser()


def file(name: str) -> Any:
    def make(root: Path, _: Path) -> Path:
        (root / name).write_bytes(b"GGUF")
        return root / name

    return make


def folder(*names: str, config: bool = False) -> Any:
    def make(root: Path, source: Path) -> Path:
        (root / "x").mkdir()
        for name in names:
            (root / "x" / name).write_bytes(b"{}")
        if config:
            shutil.copy(source / "config.json", root / "x")
        return root / "x"

    return make


@pytest.mark.parametrize("role", ["model", "draft"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (file("m.gguf"), "a GGUF file.*safetensors work"), (file("model.safetensors"), "a file; its directory"),
        (file("pytorch_model.bin"), "a file; its directory"), (file("x.txt"), "a file, no directory"),
        (file("x.pt"), "pickled weights; those of a whole model are read as"),
        (folder(), "an empty directory"), (folder("m.Q4_K.gguf"), "only GGUF files"),
        (folder("m.gguf", config=True), "only GGUF files"),
        (folder("adapter_config.json", "adapter_model.safetensors"), "an adapter .*whole model.*merge_and_unload"),
        (folder("adapter_model.bin"), r"an adapter such as LoRA \(adapter_model.bin\), not a whole model"),
        (folder("pytorch_model.bin"), "config.json: .*no such file"),
        (folder("notes.txt"), "config.json: .*no such file"), (lambda root, _: root / "nowhere", "no such directory"),
        (lambda root, _: root / ("x" * 300), "File name too long"),
    ],
)  # fmt: skip
def test_what_is_no_model_is_recognised(make: Any, message: str, role: str, tiny: Pair, tmp_path: Path) -> None:
    given = make(tmp_path, tiny.target)
    with pytest.raises(ModelFileError, match=message) as e:
        LLM(**{"model": tiny.target, "draft": tiny.draft, role: given})
    error = str(e.value)
    assert f"{role}: " in error
    assert {"model": "EAGLE", "draft": "Hugging Face model directory"}[role] not in error
    assert isinstance(e.value, ConfigError) and e.value.path in (given, given / "config.json")


@pytest.mark.parametrize("role", ["model", "draft"])
@pytest.mark.parametrize("files", [["adapter_config.json"], ["adapter_config.json", "adapter_model.safetensors"],
                                   ["adapter_model.safetensors"], ["adapter_model.bin"]])  # fmt: skip
def test_an_adapter_beside_weights_is_not_dropped(
    files: list[str], role: str, tiny: Pair, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers would load the adapter with them: they alone are another model."""
    given = tmp_path / "given"
    shutil.copytree({"model": tiny.target, "draft": tiny.draft}[role], given)
    for name in files:
        (given / name).write_bytes(b"{}")
    put(cache, "org/tuned", given)
    why = rf"{role}: an adapter .*\({', '.join(files)}\), beside the weights.*merge_and_unload.*without these files"
    for place in (given, "org/tuned"):
        with pytest.raises(ModelFileError, match=why) as e:
            LLM(**{"model": tiny.target, "draft": tiny.draft, role: place})
        assert not isinstance(e.value, HubError)
        argv = [str(place)] if role == "model" else [str(tiny.target), "--draft", str(place)]
        assert main(["doctor", *argv]) == 1 and "remedy: give what the message names" in capsys.readouterr().out
    for name in files:
        (given / name).unlink()
    assert locate(given, role) == given


def test_an_adapter_in_the_cache_is_no_snapshot_in_part(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "adapter" / name).write_bytes(b"{}")
    put(cache, "org/adapter", tmp_path / "adapter")
    with pytest.raises(ModelFileError, match=r"an adapter .*not a whole model") as e:
        LLM("org/adapter")
    assert not isinstance(e.value, HubError)  # the id names nothing to download


def test_a_wrong_draft_is_said_to_be_the_draft(tiny: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--model", str(tiny.target), "--draft", str(tmp_path / "nowhere")]) == 2
    err = capsys.readouterr().err
    assert "draft: no such directory; give the directory of an EAGLE draft head" in err and err.count("\n") == 1


def test_a_head_for_a_model_and_a_model_for_a_head(tiny: Pair) -> None:
    with pytest.raises(specrs.UnsupportedModelError, match=r"a draft head: give it as draft"):
        LLM(tiny.draft)
    with pytest.raises(specrs.UnsupportedModelError, match=r"a model, no draft head: draft needs a draft head"):
        LLM(tiny.target, tiny.target)
    assert json.loads((tiny.draft / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]
