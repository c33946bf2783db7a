"""`specrs doctor` says of a configuration what `LLM` does with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.dlpack import from_dlpack

import headzoo
from modelzoo import Pair, edit_config, read_weights, write_eagle3, write_target, write_weights
from reference_heads import Sizes
from specrs import LLM, SpecrsError, assets
from specrs.cli import main
from specrs.models import load_draft, load_target


def doctor(capsys: pytest.CaptureFixture[str], *argv: str, tried: bool = False) -> tuple[int, dict[str, Any]]:
    """Status and report; heads of random weights, which guess nothing, are not tried."""
    status = main(["doctor", *argv, "--json", *([] if tried else ["--no-run"])])
    return status, json.loads(capsys.readouterr().out)


def problems(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [f for section in report["sections"].values() for f in section if f["problem"] is not None]


def values(report: dict[str, Any], section: str) -> dict[str, Any]:
    return {f["name"]: f["value"] for f in report["sections"][section] if f["value"] is not None}


def test_the_model_in_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = doctor(capsys)
    assert status == 0 and report["ok"] and not problems(report)
    assert values(report, "model")["architecture"] == "LlamaForCausalLM"
    assert values(report, "draft head")["features of layers"] == [2, 6, 9]
    assert values(report, "configuration")["drafts by"] == ["head"]
    assert values(report, "gpu")["usable"] is False or "gpu cuda:0" in report["sections"]
    with LLM(device="cpu") as llm:
        found = values(report, "configuration")
        assert found["runs on"].split()[0] == llm.device.split()[0] and found["requests at once"] == 8
        if llm.device.startswith("cpu"):
            kv = llm._runner.executor.kv.tensor if hasattr(llm._runner.executor, "kv") else None
            assert kv is None or values(report, "memory")["KV pool of the target"] == kv.nbytes
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("No problems.\n") and "threads of the kernels" in out and "PROBLEM" not in out


def broken(pair: Pair, root: Path, how: str) -> tuple[Path, Path, list[str], dict[str, Any]]:
    """Directories with a fault, and options with one: for the command line, and for `LLM`."""
    model, draft = root / "model", root / "draft"
    shutil.copytree(pair.target, model)
    shutil.copytree(pair.draft, draft)
    argv: list[str] = []
    options: dict[str, Any] = {}
    if how == "no model":
        shutil.rmtree(model)
    elif how == "a pickle":
        (model / "model.safetensors").rename(model / "pytorch_model.bin")
    elif how == "a cut file":
        whole = (model / "model.safetensors").read_bytes()
        (model / "model.safetensors").write_bytes(whole[:100])
    elif how == "a tensor less":
        weights = read_weights(model)
        weights.pop("model.norm.weight")
        write_weights(model, weights)
    elif how == "an unknown family":
        edit_config(model, architectures=["UnheardOfForCausalLM"])
    elif how == "experts":
        edit_config(model, num_local_experts=8)
    elif how == "no tokenizer":
        (model / "tokenizer.json").write_text("{")
    elif how == "a bad default":
        (model / "generation_config.json").write_text('{"do_sample": true, "temperature": -1}')
    elif how == "no head":
        shutil.rmtree(draft)
    elif how == "a head of another width":
        edit_config(draft, target_hidden_size=72)
    elif how == "layers that there are not":
        edit_config(draft, eagle_aux_hidden_state_layer_ids=[1, 2, 40])
    elif how == "a vocabulary map that leaves it":
        weights = read_weights(draft)
        weights["d2t"][-1] = 10**6
        write_weights(draft, weights)
    elif how == "a long context":
        argv, options = ["--max-context", "99999"], {"max_context_len": 99999}
    elif how == "no GPU":
        argv, options = ["--device", "cuda:77"], {"device": "cuda:77"}
    elif how == "a wide tree":
        argv, options = ["--tree", "9,2,10"], {"tree": (9, 2, 10)}
    elif how == "half on the CPU":
        argv, options = ["--dtype", "float16", "--device", "cpu"], {"dtype": "float16", "device": "cpu"}
    elif how == "a page of three":
        argv, options = ["--page-size", "3"], {"page_size": 3}
    elif how == "a backend's limit":
        argv = ["--attention-backend", "flash_attention", "--draft-layout", "holey", "--draft-attention", "ancestors"]
        argv += ["--tree", "3,3,9"]
        options = {"attention_backend": "flash_attention", "draft_layout": "holey", "draft_attention": "ancestors"}
        options["tree"] = (3, 3, 9)
    return model, draft, argv, options


FAULTS = [
    "no model", "a pickle", "a cut file", "a tensor less", "an unknown family", "experts", "no tokenizer",
    "a bad default", "no head", "a head of another width", "layers that there are not",
    "a vocabulary map that leaves it", "a long context", "no GPU", "a wide tree", "half on the CPU", "a page of three",
    "a backend's limit",
]  # fmt: skip


@pytest.mark.parametrize("how", [*FAULTS, "nothing"])
def test_a_problem_is_the_error_of_the_engine(
    how: str, tiny: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, draft, argv, options = broken(tiny, tmp_path, how)
    status, report = doctor(capsys, str(model), "--draft", str(draft), *argv)
    found = problems(report)
    try:
        with LLM(model, draft, **options):
            pass
    except SpecrsError as error:
        assert status == 1 and not report["ok"] and report["problems"] == len(found)
        assert str(error) in [f["problem"] for f in found]
        assert all(f["remedy"] for f in found)
        assert main(["doctor", str(model), "--draft", str(draft), *argv]) == 1
        out = capsys.readouterr().out
        assert f"PROBLEM: {error}" in out and "remedy: " in out
    else:
        assert how == "nothing" and status == 0 and not found


@pytest.mark.parametrize(
    ("form", "options", "value", "note"),
    [
        ("AngelSlim", {"draft_vocab": None}, "EAGLE-3, as written by SpecForge, AngelSlim, NVIDIA", None),
        ("SpecForge", {"fc_norm": True, "norm_output": True, "draft_vocab": None},
         "EAGLE-3.1, as written by SpecForge, AngelSlim, NVIDIA", "fc_norm; norm_output"),
        ("speculators", {"layers": 2, "qk_norm": True, "norm_before_residual": True, "norm_before_fc": True,
                         "own_embedding": True}, "EAGLE-3, as written by speculators",
         "2 layers; q_norm and k_norm, as Qwen3's layers; norm_before_residual; norm_before_fc; a vocabulary of its "
         "own; embeddings of its own"),
        ("DeepSpec", {"draft_vocab": None, "streams": (0, 1, 2, 4, 5)}, "EAGLE-3, as written by DeepSpec", None),
    ],
)  # fmt: skip
def test_the_form_of_a_head_is_named(
    form: str, options: dict[str, Any], value: str, note: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_target(tmp_path / "model", num_hidden_layers=6)
    sizes = Sizes(**{"hidden": 64, "own_embedding": False, **options})
    headzoo.write_head(tmp_path / "draft", form, sizes, 6)
    edit_config(tmp_path / "draft", a_new_key=1)
    status, report = doctor(capsys, str(model), "--draft", str(tmp_path / "draft"), "--device", "cpu")
    assert status == 0
    said = {f["name"]: f for f in report["sections"]["draft head"]}
    assert (said["form"]["value"], said["form"]["note"]) == (value, note)
    notes = [f["note"] for f in report["sections"]["draft head"] if f["name"] == "config.json"]
    assert notes[0] == "config.json has keys that nothing here reads: a_new_key"
    assert len(notes) == 1 + bool(options.get("norm_output")), notes
    kv = values(report, "memory")["KV pool of the draft head"]
    with LLM(model, tmp_path / "draft", device="cpu") as llm:
        assert kv == from_dlpack(llm._runner.executor.drafts.cache.tensor).nbytes  # type: ignore[attr-defined]
    assert main(["doctor", str(model), "--draft", str(tmp_path / "draft"), "--device", "cpu", "--no-run"]) == 0
    assert f"  {value}" in capsys.readouterr().out


def test_a_head_that_does_not_run_is_a_problem_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_target(tmp_path / "model")
    (tmp_path / "draft").mkdir()
    raw = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dspark_target_layer_ids": [1, 2]}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(raw))
    status, report = doctor(capsys, str(model), "--draft", str(tmp_path / "draft"))
    [found] = problems(report)
    assert (
        status == 1 and "dspark_target_layer_ids = [1, 2]: a DSpark for DeepSeek V4 head, which has" in found["problem"]
    )
    assert "docs/models.md" in found["remedy"]


def test_what_is_worth_knowing(bytes_pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    shutil.copytree(bytes_pair.target, model)
    edit_config(model, vocab_size=250)
    weights = read_weights(model)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:250].contiguous()
    write_weights(model, weights)
    (model / "generation_config.json").write_text('{"num_beams": 4}')
    status, report = doctor(capsys, str(model))
    notes = [f["note"] for section in report["sections"].values() for f in section if f["note"]]
    assert status == 0 and any("9 tokens that the model does not have" in note for note in notes)
    assert any("num_beams = 4 is not implemented" in note for note in notes)
    assert any("llm.chat needs chat_template=" in note for note in notes) and "draft head" not in report["sections"]
    with LLM(model) as llm:  # drafts of the text itself, where it does
        assert bool(values(report, "configuration")["drafts by"]) == llm.speculative


def fault(model: Path, how: str) -> None:
    """A fault of files that would load elsewhere, or nowhere."""
    weights = read_weights(model)
    name = next(n for n in weights if n.endswith("q_proj.weight"))
    if how == "f8":
        write_weights(model, {**weights, name: weights[name].to(torch.float8_e4m3fn)})
    elif how == "cut":
        (model / "model.safetensors").write_bytes(b"x")
    elif how == "another vocabulary":
        edit_config(model, vocab_size=999)
    else:
        edit_config(model, quantization_config={"quant_method": "awq"})


@pytest.mark.parametrize("of_head", [False, True], ids=["model", "head"])
@pytest.mark.parametrize(
    ("how", "remedy"),
    [("f8", "of F32, F16 or BF16"), ("cut", "again: hf download"), ("quantised", "docs/models.md"),
     ("another vocabulary", "")],
)  # fmt: skip
def test_a_remedy_is_one_of_that_fault(
    how: str, remedy: str, of_head: bool, tiny: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, draft = tmp_path / "model", tmp_path / "draft"
    shutil.copytree(tiny.target, model)
    shutil.copytree(tiny.draft, draft)
    fault(draft if of_head else model, how)
    status, report = doctor(capsys, str(model), "--draft", str(draft))
    first = problems(report)[0]
    if how == "another vocabulary":
        remedy = "trained for" if of_head else "files that belong together"
    assert status == 1 and remedy in first["remedy"], first


def test_a_template_that_does_not_parse_is_a_problem(
    tiny: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny.target, model)
    (model / "chat_template.jinja").write_text("a\n{% if %}")
    status, report = doctor(capsys, str(model))
    [found] = problems(report)
    assert status == 1 and "chat template 'default', line 2" in found["problem"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_memory_of_weights_is_what_the_engine_takes(
    dtype: torch.dtype, tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_target(tmp_path / "model", dtype=dtype, vocab_size=320, tie_word_embeddings=tied)
    draft = write_eagle3(tmp_path / "draft", model, dtype=dtype, draft_vocab_size=None, own_embedding=True)
    # A file that nobody reads.
    (model / "consolidated.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    status, report = doctor(capsys, str(model), "--draft", str(draft), "--device", "cpu")
    assert status == 0
    target = load_target(model)
    head = load_draft(draft, target)
    for line, loaded in (("target", target), ("draft head", head)):
        packed = sum(product.nbytes for _, product in loaded.products())  # type: ignore[attr-defined]
        shapes = {n: w.shape for n, w in read_weights(model if line == "target" else draft).items()}
        norms = sum(shape.numel() for shape in shapes.values() if len(shape) == 1)
        assert values(report, "memory")[f"weights of the {line}"] == packed + loaded.embedding.table.nbytes + 4 * norms


def test_a_head_is_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No shape tells that features come from wrong layers, or that weights are another model's."""
    status, report = doctor(capsys, tried=True)
    [found] = report["sections"]["draft head at work"]
    share, text = found["value"].split("%")
    assert status == 0 and int(share) > 40 and text == " over 64 tokens"
    draft = shutil.copytree(assets.draft_dir(), tmp_path / "draft")
    weights = read_weights(draft)
    mixed = weights["lm_head.weight"][torch.randperm(4096, generator=torch.Generator().manual_seed(1))]
    write_weights(draft, {**weights, "lm_head.weight": mixed.contiguous()})
    status, report = doctor(capsys, str(assets.model_dir()), "--draft", str(draft), tried=True)
    [found] = problems(report)
    assert status == 1 and found["problem"].endswith("the head does not seem to be trained for this model")
    assert "config.json names the layers" in found["remedy"]
    status, report = doctor(capsys, str(assets.model_dir()), "--draft", str(draft))
    assert status == 0 and "draft head at work" not in report["sections"]


def test_a_wrong_command_is_status_2(tiny: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tiny.target), "--dtype", "int8"]) == 2
    assert "dtype = 'int8': must be one of 'auto', 'float32'" in capsys.readouterr().err
    assert main(["doctor", str(tiny.target), "--tree", "x"]) == 2
    assert main(["doctor", "org/name"]) == 1  # nothing is downloaded
    assert "no snapshot of 'org/name'" in capsys.readouterr().out


def test_memory_that_no_machine_has(tiny: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = doctor(capsys, str(tiny.target), "--num-pages", "2000000000")
    [found] = problems(report)
    assert status == 1 and found["remedy"]
