"""`specrs train-head` on the CPU: what it learns and writes, and how it ends, goes on and refuses."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from modelzoo import Pair, edit_config, read_weights, write_weights
from specrs import LLM, SamplingParams, progress
from specrs.cli import main
from specrs.models.acceptance import HEATS, read_acceptance
from specrs.train import trainer as training
from specrs.train.checkpoint import Checkpoint

CODE = Path(json.__file__).parent


def train(out: Path, *argv: str) -> int:
    return main(["train-head", *argv, "--out", str(out), "--device", "cpu"])


def record(out: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((out / "training.json").read_text())
    return told


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A head of the model in the package, and the exit status."""
    root = tmp_path_factory.mktemp("small")
    (root / "json").mkdir()
    for file in sorted(CODE.glob("*.py")):
        shutil.copy(file, root / "json")
    argv = ["--text", str(root / "json"), "--tokens", "8000", "--length", "64", "--batch", "2", "--draft-vocab", "512",
            "--intermediate", "128", "--answer-tokens", "64", "--report-prompts", "3"]  # fmt: skip
    return root / "head", train(root / "head", *argv)


def test_a_head_learns_and_drafts(small: tuple[Path, int]) -> None:
    out, status = small
    said = record(out)
    [kind] = said["curve"][0]["held_out"]
    first, *_, last = (point["held_out"][kind] for point in said["curve"])
    assert all(b < a - 0.5 for a, b in zip(first["loss"], last["loss"], strict=True))
    assert last["agreement"][0] > 0.1 and said["coverage"] > 0.8 and said["finished"]
    found = said["measured"]
    assert found["identical"] and found["kinds"]["all"]["bush"] > 1.2 and found["kinds"]["all"]["tokens"] > 100
    assert status == (0 if found["head"] > found["plain"] else 3)
    params = SamplingParams(max_tokens=48, temperature=0.0)
    with LLM(draft=out, tree=(4, 4, 16), device="cpu") as drafted, LLM(speculative=False, device="cpu") as plain:
        prompts = ["def loads(s):\n", "class JSONDecoder:\n"]
        [*one], [*other] = (llm.generate(prompts, params) for llm in (drafted, plain))
    assert [o.token_ids for o in one] == [o.token_ids for o in other]
    assert sum(o.mean_accepted * o.rounds for o in one) / sum(o.rounds for o in one) > 1.2


def test_the_directory_is_a_published_head_with_its_card(small: tuple[Path, int]) -> None:
    out, _ = small
    names = {"config.json", "model.safetensors", "acceptance.json", "README.md", "training.json", "acceptance.svg"}
    assert {path.name for path in out.iterdir()} == names  # the checkpoint is gone
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 512
    weights = read_weights(out)
    assert weights["fc.weight"].dtype == torch.bfloat16 and int(weights["t2d"].sum()) == 512
    heats = read_acceptance(out)
    assert len(heats) == len(HEATS) and 0.05 < heats[0].level(0) < 1
    card = (out / "README.md").read_text()
    said = record(out)
    assert all(digest in card for digest in said["digests"].values()) and "| json | 3 |" in card
    assert f"{said['counts']['tokens trained on']:,} tokens" in card and "acceptance.svg" in card
    assert ">json</text>" in (out / "acceptance.svg").read_text()


@contextmanager
def interrupted_at(calls: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C as the training tells its progress for the given time."""

    @contextmanager
    def shares(name: str, shown: bool | None) -> Iterator[Callable[[float, str], None]]:
        told = 0

        def tell(share: float, text: str) -> None:
            nonlocal told
            told += 1
            if name == "training" and told == calls:
                signal.raise_signal(signal.SIGINT)

        yield tell

    with monkeypatch.context() as patch:
        patch.setattr(progress, "shares", shares)
        yield


@pytest.fixture
def options(bytes_pair: Pair, tmp_path: Path) -> list[str]:
    """A quick training of a tiny model, by answers, text and prompts."""
    text = tmp_path / "text"
    text.mkdir()
    for i in range(6):
        (text / f"{i}.txt").write_text(f"{i} bottles of beer on the wall\n" * 5)
    prompts = [json.dumps({"prompt": f"Take {i} down", "kind": "songs"}) for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join([*prompts, json.dumps({"prompt_token_ids": [1, 2, 3]})]))
    return [str(bytes_pair.target), "--text", str(text), "--prompts", str(tmp_path / "prompts.jsonl"), "--tokens",
            "640", "--length", "32", "--batch", "2", "--draft-vocab", "64", "--answer-tokens", "16", "--report-prompts",
            "1", "--layers", "2"]  # fmt: skip


def test_what_was_interrupted_goes_on_bit_for_bit(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, *options)
    assert "goes on" not in capsys.readouterr().out and not (whole / "checkpoint").exists()
    for calls in (3, 4):
        with interrupted_at(calls, monkeypatch):
            train(parts, *options, *(["--resume"] if calls == 4 else []))
        assert "ended before its time; --resume goes on" in capsys.readouterr().out
        assert (parts / "checkpoint" / "state.pt").exists() and "ended before" in (parts / "README.md").read_text()
    assert record(parts)["counts"]["tokens trained on"] == 9 * 64
    train(parts, *options, "--resume")
    for a, b in zip(read_weights(whole).items(), read_weights(parts).items(), strict=True):
        assert a[0] == b[0] and torch.equal(a[1], b[1]), a[0]
    one, other = record(whole), record(parts)
    assert [p["held_out"] for p in one["curve"]] == [p["held_out"] for p in other["curve"]]
    assert {*one["curve"][0]["held_out"]} >= {"text", "songs"} and one["finished"] and other["finished"]


def test_ctrl_c_while_the_model_answers_ends_with_what_there_is(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = LLM.step

    def interrupted(llm: LLM) -> Any:
        signal.raise_signal(signal.SIGINT)
        return step(llm)

    monkeypatch.setattr(LLM, "step", interrupted)
    train(tmp_path / "out", *options)
    said = record(tmp_path / "out")
    assert said["counts"]["tokens trained on"] == 0 and not said["finished"]


@pytest.mark.parametrize(
    ("change", "error"),
    [(["--seed", "1"], "resume: seed = 1: the checkpoint was made with 0"),
     (["--tokens", "999"], "resume: tokens = 999: the checkpoint was made with 640"),
     ("text", "resume: text = "), ("model", "resume: model = "), ("cut", "is no checkpoint: ")],
    ids=str,
)  # fmt: skip
def test_another_training_is_not_resumed(
    change: Any, error: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out, argv = tmp_path / "out", list(options)
    with interrupted_at(1, monkeypatch):
        train(out, *argv)
    capsys.readouterr()
    if change == "text":
        (tmp_path / "text" / "more.txt").write_text("more")
    elif change == "model":
        argv[0] = str(shutil.copytree(argv[0], tmp_path / "model"))
        edit_config(Path(argv[0]), rope_theta=777.0)
    elif change == "cut":
        (out / "checkpoint" / "state.pt").write_bytes(b"PK")
    else:
        argv += change
    assert train(out, *argv, "--resume") == 2
    assert error in capsys.readouterr().err
    assert train(out, *options) == 2
    assert "a checkpoint, with which --resume goes on" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_the_model_answers(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for out, error in ((tmp_path / "file", "is a file; give a dir"), (tmp_path / "file" / "x", "cannot be written")):
        assert train(out, *options) == 2
        said = capsys.readouterr().err
        assert f"out = '{out}': {error}" in said and "training on" not in said
    out = tmp_path / "refused"
    assert train(out, *options[:1], "--text", "nowhere") == 2 and not out.exists()


@pytest.mark.parametrize("form", ["eagle3", "dspark", "dflash"])
@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 64 vs 0")])
def test_a_full_disk_keeps_the_checkpoint_before(
    form: str, fault: Exception, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    whole, parts, argv = tmp_path / "whole", tmp_path / "parts", [*options, "--form", form]
    train(whole, *argv)
    write = torch.save

    def full(value: Any, file: Any) -> None:
        file.write(b"PK")
        raise fault

    monkeypatch.setattr(torch, "save", full)
    assert train(parts, *argv) == 2
    assert f"checkpoint in {parts / 'checkpoint'}: cannot be written: {fault}; there is none yet" in (
        capsys.readouterr().err
    )
    assert not any(parts.iterdir()), "so that the same command works once there is room"
    monkeypatch.setattr(torch, "save", write)
    with interrupted_at(3, monkeypatch):
        train(parts, *argv)
    monkeypatch.setattr(torch, "save", full)
    assert train(parts, *argv, "--resume") == 2
    assert f"{fault}; the one before is kept, with which --resume goes on" in capsys.readouterr().err
    assert [path.name for path in (parts / "checkpoint").iterdir()] == ["state.pt"]
    monkeypatch.setattr(torch, "save", write)

    def no_room(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("specrs.train.heads.save_file", no_room)
        assert train(parts, *argv, "--resume") == 2
    assert "the training is over, and --resume writes the head once there is room" in capsys.readouterr().err
    train(parts, *argv, "--resume")
    assert not (parts / "checkpoint").exists()
    for a, b in zip(read_weights(whole).items(), read_weights(parts).items(), strict=True):
        assert a[0] == b[0] and torch.equal(a[1], b[1]), a[0]


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ([], "text and prompts: neither is given"),
        (["--text", "{text}", "--tokens", "0"], "tokens = 0: must be 1 to "),
        (["--text", "{text}", "--tokens", "9", "--minutes", "1"], "minutes = 1.0 with tokens = 9: one of the two"),
        (["--text", "{text}", "--draft-vocab", "9999"], "draft_vocab = 9999: must be 8 to "),
        (["--text", "{text}", "--length", "999"], "length = 999: must be 16 to 256"),
        (["--text", "{text}", "--form", "medusa"], "form = 'medusa': must be one of eagle3, dspark, dflash"),
        (["--text", "{text}", "--block", "4"], "block = 4: must be 0 for eagle3"),
        (["--text", "{text}", "--form", "dflash", "--markov-rank", "8"], "markov_rank = 8: must be 0 for dflash"),
        (["--text", "{text}", "--rate", "3"], "rate = 3.0: must be 1e-07 to 1.0"),
        (["--text", "{text}", "--report-prompts", "0"], "report_prompts = 0: must be at least 1"),
        (["--text", "{text}", "--resume"], "resume: no checkpoint in "),
        (["--text", "{text}/one.txt"], "text: 1 document, of which none can be held out"),
        (["--text", "nowhere"], "text = 'nowhere': no such file"),
        (["--prompts", "{text}/one.txt"], "one.txt, line 1: not JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_commands_name_option_and_value(
    argv: list[str], error: str, bytes_pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(name)
    filled = [one.format(text=tmp_path) for one in argv]
    assert train(tmp_path / "out", str(bytes_pair.target), *filled) == 2
    assert error in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_models_that_no_head_fits_and_full_directories_are_refused(
    tiny: Pair, bytes_pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text("one")
    text = ["--text", str(tmp_path)]
    assert train(tmp_path / "out", str(tiny.target), *text, "--draft-vocab", "8") == 2
    assert "has no tokenizer.json" in capsys.readouterr().err
    shallow = shutil.copytree(bytes_pair.target, tmp_path / "model")
    edit_config(shallow, num_hidden_layers=2)
    assert train(tmp_path / "out", str(shallow), *text) == 2
    assert "num_hidden_layers = 2: a head reads" in capsys.readouterr().err
    (tmp_path / "two.txt").write_text("two")
    assert train(tmp_path, str(bytes_pair.target), *text) == 2
    assert "has files; give a directory that is empty" in capsys.readouterr().err


def test_a_training_that_diverges_keeps_the_checkpoint_before(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with interrupted_at(2, monkeypatch):
        train(tmp_path / "out", *options)
    kept = (tmp_path / "out" / "checkpoint" / "state.pt").read_bytes()
    monkeypatch.setattr(training.Trainer, "_step", lambda self: float("nan"))
    assert train(tmp_path / "out", *options, "--resume") == 2
    assert "loss = nan after 192 tokens: the training diverged; a smaller rate" in capsys.readouterr().err
    assert (tmp_path / "out" / "checkpoint" / "state.pt").read_bytes() == kept


def test_minutes_are_for_answers_and_steps(options: list[str], tmp_path: Path) -> None:
    argv = [*options, "--minutes", "0.03"]
    at = argv.index("--tokens")
    del argv[at : at + 2]
    train(tmp_path / "out", *argv)
    said = record(tmp_path / "out")
    assert said["finished"] and said["counts"]["tokens trained on"] > 64 and said["answer_seconds"] < 1.5
    assert 0 < said["seconds"] < 4 and said["counts"]["answers"] > 0


def test_text_and_prompts_that_the_model_has_no_tokens_for(
    options: list[str], bytes_pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(bytes_pair.target, tmp_path / "model")
    edit_config(model, vocab_size=110)  # ASCII up to n
    weights = read_weights(model)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:110].contiguous()
    write_weights(model, weights)
    (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [200]}\n{"prompt_token_ids": [201]}\n')
    assert train(tmp_path / "out", str(model), *options[3:], "--draft-vocab", "64") == 2
    assert "prompts: all 2 are refused, the first with: prompt[0] = 20" in capsys.readouterr().err


def test_what_a_gpu_compiles_by_changes_no_step(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "cold", *options)
    begin = training.Trainer.train

    def warmed(self: training.Trainer, *args: Any) -> None:
        self._warm_up()
        begin(self, *args)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(training.Trainer, "train", warmed)
    train(tmp_path / "warm", *options)
    cold, warm = (read_weights(tmp_path / name) for name in ("cold", "warm"))
    assert all(torch.equal(cold[name], warm[name]) for name in cold)


@pytest.mark.parametrize("form", ["dspark", "dflash"])
def test_a_block_head_learns_drafts_and_goes_on_bit_for_bit(
    form: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*options, "--form", form, "--block", "4"]
    argv += ["--markov-rank", "16"] if form == "dspark" else []
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(whole, *argv) in (0, 1, 3)
    with interrupted_at(3, monkeypatch):
        train(parts, *argv)
    assert record(parts)["counts"]["tokens trained on"] == 4 * 64
    assert train(parts, *options, "--resume") == 2
    assert f"resume: form = 'eagle3': the checkpoint was made with '{form}'" in capsys.readouterr().err
    train(parts, *argv, "--resume")
    for a, b in zip(read_weights(whole).items(), read_weights(parts).items(), strict=True):
        assert a[0] == b[0] and torch.equal(a[1], b[1]), a[0]
    said = record(whole)
    first, *_, last = (point["held_out"]["text"] for point in said["curve"])
    assert len(first["loss"]) == 4 and all(b < a - 0.1 for a, b in zip(first["loss"], last["loss"], strict=True))
    assert said["measured"]["identical"] and said["finished"]
    config = json.loads((whole / "config.json").read_text())
    assert config["speculators_model_type"] == form and config["block_size"] == (4 if form == "dspark" else 5)
    assert f"# {said['form']} head of" in (whole / "README.md").read_text()
    params = SamplingParams(max_tokens=24, temperature=0.0)
    with LLM(options[0], draft=whole, device="cpu") as drafted, LLM(options[0], speculative=False, device="cpu") as llm:
        [one], [other] = (each.generate(["3 bottles of"], params) for each in (drafted, llm))
    assert one.token_ids == other.token_ids


def test_a_fault_of_the_device_is_not_called_one_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Checkpoint(tmp_path, {"form": "eagle3"})
    kept.save({"steps": 1})

    def fails() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    with pytest.raises(RuntimeError, match=r"^CUDA error"):
        kept.save({"steps": 2})
    assert kept.load()["steps"] == 1
