"""Combinations that may be asked of backends: the whole small domain, and the truth of what is said of it."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backend_rounds import Round, check_round
from formats_world import World
from modelzoo import Pair, edit_config
from specrs import LLM, ConfigError, SamplingParams
from specrs.backends import (
    BACKENDS,
    AttentionBackend,
    Capabilities,
    Combination,
    FlashAttention,
    FlashInfer,
    Native,
    PlanAttention,
    Resolved,
    Triton,
    UnsupportedCombinationError,
    check,
    find,
    needs_cpu_seq_lens,
    resolve,
)
from specrs.backends.__main__ import main
from specrs.backends.table import BEGIN, END, rewritten, table
from specrs.models import ModelConfig, UnsupportedModelError

README = Path(__file__).parents[3] / "README.md"


class Bare:
    """A user's own backend that declares only its format, and is not even a subclass."""

    format = "triton"

    def prepare(self, step: Any) -> Any:
        return Triton().prepare(step)

    def attend(self, *args: Any) -> Any:
        return Triton().attend(*args)


class Pages(FlashAttention):
    """A backend that reads whole pages in the holey layout alone, bfloat16 alone."""

    name = "pages"
    draft_attention = {"holey": ("lane",)}  # noqa: RUF012
    kv_dtypes = ("bfloat16",)


MINE: list[Any] = [Bare(), Pages(), *(cls() for cls in BACKENDS.values())]


def domain() -> Iterator[Combination]:
    for topk, page, layout, mode, recurrent, dtype in itertools.product(
        (None, 1, 2), (1, 4), (None, "dense", "holey"), (None, "ancestors", "lane"), (False, True),
        ("float32", "bfloat16"),
    ):  # fmt: skip
        yield Combination(
            topk=topk, page_size=page, layout=layout, draft_attention=mode, recurrent_state=recurrent, kv_dtype=dtype
        )


def answers(backend: Any) -> dict[Combination, Resolved | UnsupportedCombinationError]:
    found: dict[Combination, Any] = {}
    for asked in domain():
        try:
            found[asked] = resolve(backend, asked)
        except UnsupportedCombinationError as error:
            found[asked] = error
    return found


def runs(backend: Any, asked: Combination, found: Resolved) -> None:
    """A round of the combination, through pool, planner and attention."""
    topk = asked.topk or 1
    mask = found.capabilities.mask
    shim = backend if isinstance(backend, AttentionBackend) else type("Shim", (type(backend),), {"mask": mask})()
    at = Round.of(shim, found.layout, (topk, 2, 4 if topk > 1 else 3), asked.page_size, [5, 8], 1)
    assert at.geometry.layout == found.layout
    assert check_round(at, shim, found.layout, found.draft_attention) > 0


@pytest.mark.parametrize("backend", MINE, ids=lambda b: type(b).__name__)
def test_what_is_accepted_runs_and_what_is_refused_has_an_alternative_that_does(backend: Any) -> None:
    ran: set[Any] = set()
    for asked, found in answers(backend).items():
        if isinstance(found, UnsupportedCombinationError):
            assert found.combination == asked and found.why in str(found)
            assert found.alternatives, asked
            for other in found.alternatives:
                assert other.change in str(found) or repr(other.backend) in str(found)
                instead = backend if other.backend == found.backend else BACKENDS[other.backend]()
                resolve(instead, other.combination)
            continue
        assert check(Capabilities.of(backend), asked) is None
        assert found.speculate is not asked.recurrent_state
        if (asked.topk or 1) > 1:
            assert found.draft_attention == (asked.draft_attention or found.draft_attention)
            assert found.layout == (asked.layout if asked.layout and asked.holes else found.layout)
        assert asked.holes or found.layout == "dense"
        key = (asked.topk or 1, asked.page_size, found.layout, found.draft_attention)
        if key not in ran and not isinstance(backend, Native):
            ran.add(key)
            runs(backend, asked, found)


@pytest.mark.parametrize("name", BACKENDS)
def test_an_engine_is_made_of_what_is_accepted_and_of_nothing_else(tiny: Pair, name: str) -> None:
    """An engine refuses a combination if and only if routing does; the core refuses it too, where it is a matter of the
    format."""
    made: set[Any] = set()
    for asked, found in answers(name).items():
        if asked.recurrent_state or asked.kv_dtype != "float32":
            continue
        tree = {} if asked.topk is None else {"tree": (asked.topk, 2, 3)}
        options: dict[str, Any] = {
            "page_size": asked.page_size, "draft_layout": asked.layout, "draft_attention": asked.draft_attention,
            "attention_backend": name, "max_batch": 2, **tree,
        }  # fmt: skip
        if isinstance(found, UnsupportedCombinationError):
            with pytest.raises(UnsupportedCombinationError) as caught:
                LLM(tiny.target, tiny.draft, **options)
            assert str(caught.value) == str(found)
            with pytest.raises(ConfigError):
                Round.of(BACKENDS[name](), asked.layout, (2, 2, 4), 4, [5], 1).plans(asked.draft_attention)
            continue
        key = (asked.topk, asked.page_size, found.layout, found.draft_attention)
        if key in made:
            continue
        made.add(key)
        llm = LLM(tiny.target, tiny.draft, **options)
        assert (llm.config.draft_layout, llm.config.draft_attention) == (found.layout, found.draft_attention)
        assert type(llm.config.backend) is BACKENDS[name] and llm.speculative
        [out] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
        assert len(out.token_ids) == 4
    assert made


@pytest.mark.parametrize(
    ("backend", "asked", "parts"),
    [
        (FlashAttention(), Combination(topk=4, page_size=16, layout="holey", draft_attention="ancestors"),
         ["'flash_attention' with tree=(4, S, V), page_size=16, draft_layout='holey', draft_attention='ancestors'",
          "draft_attention='lane'; or draft_layout='dense'; or page_size=1"]),
        (Native(), Combination(topk=2, page_size=4, layout="holey"),
         ["native reads the dense draft layout", "draft_layout='dense'", "attention_backend='flashinfer'"]),
        (Triton(), Combination(topk=1, page_size=4, recurrent_state=True),
         ["recurrent_state=True", "decoded plainly", "no tree (tree=None)"]),
        (Bare(), Combination(topk=2, page_size=1), ["'Bare'", "one branch per draft step", "tree=(1, S, V)"]),
        (Bare(), Combination(topk=2, page_size=16),
         ["tree=(1, S, V) with page_size=1", "='native' or 'flashinfer' or"]),
        (Pages(), Combination(topk=2, page_size=4, kv_dtype="float32"), ["KV of bfloat16", "kv_dtype='bfloat16'"]),
    ],
)  # fmt: skip
def test_a_refusal_says_what_and_what_instead(backend: Any, asked: Combination, parts: list[str]) -> None:
    with pytest.raises(UnsupportedCombinationError) as caught:
        resolve(backend, asked)
    for part in parts:
        assert part in str(caught.value)
    assert isinstance(caught.value, ConfigError) and isinstance(caught.value, ValueError)


def test_undeclared_flags_promise_the_least() -> None:
    bare = Capabilities.of(Bare())
    assert bare == Capabilities(
        name="Bare", format="triton", reads="its format's arrays", topk_above_1=False, page_size_above_1=False,
        draft_attention={"dense": ("lane",)}, kv_dtypes=("float32",), needs_cpu_seq_lens=True, recurrent_state=False,
        mask="both",
    )  # fmt: skip


def test_needs_cpu_seq_lens_takes_slots_as_they_are() -> None:
    """sglang PR 26738: an empty slot, and a backend that does not declare the flag."""
    assert needs_cpu_seq_lens([]) is False
    assert needs_cpu_seq_lens([None]) is False
    assert needs_cpu_seq_lens([None, Triton(), Native()]) is False
    assert needs_cpu_seq_lens([Triton(), None, FlashInfer()]) is True
    assert needs_cpu_seq_lens([Triton(), object()]) is True
    assert needs_cpu_seq_lens([Bare()]) is True
    assert needs_cpu_seq_lens(iter([FlashAttention()])) is True


@pytest.mark.parametrize(
    ("backend", "message"),
    [("fa3", "attention_backend = 'fa3': must be one of native, flashinfer, flash_attention, triton"),
     (Triton, "a class; give an instance, Triton()"), (object(), "no method 'prepare'"), (3, "no method 'prepare'"),
     (type("F", (Triton,), {"format": "mla"})(), "format = 'mla': must be one of 'native', 'flashinfer'"),
     (type("F", (Triton,), {"format": "native"})(), "specrs's own kernels alone"),
     (type("F", (Triton,), {"topk_above_1": 1})(), "topk_above_1 = 1: must be one of False, True"),
     (type("F", (Triton,), {"kv_dtypes": ()})(), r"kv_dtypes = \(\)"),
     (type("F", (Triton,), {"kv_dtypes": "float32"})(), "kv_dtypes = 'float32'"),
     (type("F", (Triton,), {"kv_dtypes": [{}]})(), r"kv_dtypes = \[\{\}\]"),
     (type("F", (Triton,), {"draft_attention": {"dense": [["lane"]]}})(), r"draft_attention\['dense'\] = \[\["),
     (type("F", (Triton,), {"draft_attention": {"sparse": ("lane",)}})(), "'sparse'"),
     (type("F", (Triton,), {"draft_attention": {"dense": ("all",)}})(), "draft_attention\\['dense'\\]"),
     (type("F", (Triton,), {"draft_attention": "dense"})(), "must map layouts"),
     (type("F", (Triton,), {"attend": None})(), "no method 'attend'"),
     (type("G", (AttentionBackend,), {"format": "triton", "prepare": Triton.prepare})(), "no method 'attend'"),
     (type("F", (Triton,), {"name": 7})(), "name = 7")],
)  # fmt: skip
def test_what_is_no_backend_is_refused(tiny: Pair, backend: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(tiny.target, tiny.draft, attention_backend=backend)


def test_values_that_there_are_not_are_refused(tiny: Pair) -> None:
    for options in ({"draft_layout": "sparse"}, {"draft_attention": "all"}, {"kv_dtype": "int8"}):
        [(name, value)] = options.items()
        with pytest.raises(ConfigError, match=f"{name} = '{value}': must be"):
            LLM(tiny.target, tiny.draft, **options)
    with pytest.raises(ConfigError, match="mask = 'bits'"):
        FlashInfer("bits")  # type: ignore[arg-type]


def test_no_backend_is_the_own_one() -> None:
    assert isinstance(find(None), Native)
    mine = Bare()
    assert find(mine) is mine  # type: ignore[arg-type]


def test_a_backend_of_a_user_generates(tiny: Pair) -> None:
    params = SamplingParams(max_tokens=12)
    want = LLM(tiny.target, tiny.draft).generate([[1, 2, 3]], params)[0].token_ids
    llm = LLM(tiny.target, tiny.draft, attention_backend=Bare(), page_size=1)
    assert llm.generate([[1, 2, 3]], params)[0].token_ids == want
    with pytest.raises(UnsupportedCombinationError, match="page_size=1"):
        LLM(tiny.target, tiny.draft, attention_backend=Bare(), page_size=16)


@pytest.mark.parametrize(
    ("change", "got"),
    [(lambda t: t.flatten(1), r"\[3, 128\] torch.float32 on cpu"), (lambda t: t.double(), r"4, 32\] torch.float64"),
     (lambda t: None, "a NoneType"), (lambda t: (t, t), "a tuple"), (lambda t: t.numpy(), "a ndarray"),
     (lambda t: t.to("meta"), "torch.float32 on meta"), (lambda t: t.to_sparse(), "torch.sparse_coo")],
)  # fmt: skip
def test_a_result_that_is_no_tensor_like_q_is_refused(tiny: Pair, change: Any, got: str) -> None:
    class Other(Triton):
        def attend(self, *args: Any) -> Any:
            return change(super().attend(*args))

    llm = LLM(tiny.target, attention_backend=Other(), speculative=False)  # else its passes are measured at once
    with pytest.raises(
        ConfigError, match=rf"'triton': attend gave .*{got}.*, must give \[3, 4, 32\] torch.float32 on cpu"
    ):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert llm.audit()["sequences"] == 0


def test_a_result_with_a_gradient_counts_as_its_values(tiny: Pair) -> None:
    class Traced(Triton):
        def attend(self, *args: Any) -> Any:
            return super().attend(*args).requires_grad_()

    params = SamplingParams(max_tokens=4)
    want = LLM(tiny.target).generate([[1, 2, 3]], params)[0].token_ids
    assert LLM(tiny.target, attention_backend=Traced()).generate([[1, 2, 3]], params)[0].token_ids == want


def test_a_backend_without_a_name_is_called_by_its_class() -> None:
    class Nameless:
        format = "triton"
        prepare = attend = Triton().prepare

    w = World("flashinfer")
    attention = PlanAttention(Nameless())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'flashinfer'; the attention backend 'Nameless' reads 'triton'"):
        attention(None, 0, w.plan("decode"), None, None, 1.0)  # type: ignore[arg-type]


# -- recurrent state --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "what"),
    [({"architectures": ["Mamba2ForCausalLM"]}, "architectures"),
     ({"architectures": ["NemotronHForCausalLM"]}, "architectures"),
     ({"architectures": ["X"], "model_type": "falcon_mamba"}, "model_type"), ({"mamba_d_state": 16}, "mamba_d_state"),
     ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
     ({"layers_block_type": ["attention", "mamba"]}, "layers_block_type"),
     ({"block_types": ["recurrent", "attention"]}, "block_types"),
     ({"hybrid_override_pattern": "M-M*-"}, "hybrid_override_pattern"),
     ({"text_config": {"layer_types": ["linear_attention"]}}, "layer_types")],
)  # fmt: skip
def test_recurrent_layers_are_recognised(tiny: Pair, tmp_path: Path, keys: dict[str, Any], what: str) -> None:
    shutil.copytree(tiny.target, tmp_path / "target")
    edit_config(tmp_path / "target", **keys)
    with pytest.raises(UnsupportedModelError, match=r"no model with recurrent .* is implemented yet") as caught:
        LLM(tmp_path / "target", tiny.draft)  # routed to plain decoding, which such a model has not here either
    assert caught.value.what == what
    with pytest.raises(UnsupportedCombinationError, match="no tree") as asked:
        LLM(tmp_path / "target", tiny.draft, tree=(2, 2, 4))
    assert asked.value.combination.recurrent_state
    with pytest.raises(UnsupportedModelError):
        LLM(tmp_path / "target", tiny.draft, tree=(2, 2, 4), speculative=False)


def test_attention_layers_are_not_recurrent(tiny: Pair) -> None:
    config = ModelConfig.from_directory(tiny.target)
    assert config.architecture == "LlamaForCausalLM"
    edit = {"layer_types": ["full_attention"] * 4, "hybrid_override_pattern": "*-*-"}
    raw = {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 9,
           "num_attention_heads": 4, "intermediate_size": 8, **edit}  # fmt: skip
    assert ModelConfig.from_dict(raw).num_layers == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_recurrent_models_decode_plainly(tiny: Pair, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The route itself, as it will be taken: here by a model that only says that it is recurrent."""
    params = SamplingParams(max_tokens=10, temperature=0.8, seed=1)
    want = LLM(tiny.target, speculative=False).generate([[1, 2, 3]], params)[0]
    monkeypatch.setattr("specrs.engine.llm.has_recurrent_state", lambda _: True)
    llm = LLM(tiny.target, tiny.draft, attention_backend=backend)
    assert not llm.speculative
    [out] = llm.generate([[1, 2, 3]], params)
    assert (out.token_ids, out.rounds) == (want.token_ids, want.rounds)
    with pytest.raises(UnsupportedCombinationError, match="recurrent_state=True"):
        LLM(tiny.target, tiny.draft, attention_backend=backend, tree=(1, 2, 3))


# -- the table in the README ------------------------------------------------------------------------------------


def test_the_readme_says_what_the_classes_declare() -> None:
    text = README.read_text(encoding="utf-8")
    assert rewritten(text, table([cls() for cls in BACKENDS.values()])) == text, "run `make backends-table`"


def test_the_table_says_what_resolve_does() -> None:
    """Each cell is looked up by way of `resolve`, so that table and routing cannot drift apart."""
    lines = table(MINE).splitlines()
    assert len(lines) == 2 + len(MINE)
    for backend, line in zip(MINE, lines[2:], strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found = {asked: not isinstance(answer, ConfigError) for asked, answer in answers(backend).items()}
        for cell, page, layout in ((cells[3], 1, None), (cells[4], 4, "dense"), (cells[5], 4, "holey")):
            for mode in ("ancestors", "lane"):
                dtype = Capabilities.of(backend).kv_dtypes[0]
                asked: Any = {"topk": 2, "page_size": page, "layout": layout, "draft_attention": mode}
                able = found[Combination(**asked, kv_dtype=dtype)]
                assert (mode in cell) == able, (line, mode, page, layout)


def test_markers_are_checked_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "doc.md"
    for text in ("nothing", f"{BEGIN} {BEGIN} {END}", f"{END}\n{BEGIN}\n"):
        document.write_text(text)
        assert main([str(document)]) == 2
        assert "marker" in capsys.readouterr().err
        assert document.read_text() == text
    document.write_text(f"a\n{BEGIN}\nold\n{END}\nb\n")
    assert main([str(document)]) == 0
    assert "rewritten" in capsys.readouterr().out
    assert main([str(document)]) == 0
    assert "up to date" in capsys.readouterr().out
    assert document.read_text() == f"a\n{BEGIN}\n{table([cls() for cls in BACKENDS.values()])}{END}\nb\n"


def test_capabilities_are_read_without_torch() -> None:
    code = "import sys, specrs.backends; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
