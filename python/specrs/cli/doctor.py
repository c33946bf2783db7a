"""``specrs doctor``: what this machine and these files can do, by the checks that ``specrs.LLM`` makes.

It downloads nothing. With a draft head and no problem found, it has the model write 64 tokens and counts how many of
them the head guesses, which alone tells a head of another model; without a head, or with ``--no-run``, it loads no
weights. Without MODEL, it looks at the small model in the package. Exit status 0: the configuration runs. 1: it does
not, or a file has a fault; each problem comes with its remedy. 2: the command is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from specrs._specrs import DeviceMemoryError, SpecrsError, __version__, num_threads
from specrs.cli import options
from specrs.cli.certify import human

if TYPE_CHECKING:
    from specrs.chat import ChatTemplates
    from specrs.engine.config import EngineConfig
    from specrs.engine_options import EngineOptions
    from specrs.models import HeadConfig, ModelConfig

_T = TypeVar("_T")
_TRIED = 64  # tokens of the text by which a head is tried
_LEAST_ACCEPTED = 0.05


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        section, name: the part of the report that the finding belongs to, and the thing that was looked at.
        value: the result; plain values for JSON.
        problem: the reason why the result does not do; ``None``: it does.
        remedy: the change that would make it do.
        note: a remark on a result that does.
    """

    section: str
    name: str
    value: Any = None
    problem: str | None = None
    remedy: str | None = None
    note: str | None = None


def _remedy(error: Exception, usual: str) -> str:
    """Return what would work; usual: the remedy where the error's kind does not name one."""
    from specrs.models import DraftMismatchError, HubError, ModelFileError, UnsupportedModelError

    if isinstance(error, DeviceMemoryError):
        return error.hint.lstrip("; ")
    if isinstance(error, HubError):
        return "download it as the message says, or let LLM do so: doctor downloads nothing"
    if isinstance(error, DraftMismatchError):
        return "a head works with the one model that it was trained for: give that model, or its head"
    if isinstance(error, UnsupportedModelError):
        return "give one that specrs runs (docs/models.md); where the file is wrong, correct the key that is named"
    if isinstance(error, ModelFileError) and error.tensor is not None:
        return (
            "give files that belong together, of F32, F16 or BF16: all of one revision, with its own config.json, and "
            "no other program's conversion"
        )
    return usual


@dataclass
class Report:
    """Findings in the order in which they were made."""

    findings: list[Finding] = field(default_factory=list)

    def add(self, section: str, name: str, value: Any, note: str | None = None) -> None:
        """Add a finding without a problem."""
        self.findings.append(Finding(section, name, value, note=note))

    def check(self, section: str, name: str, work: Callable[[], _T], remedy: str) -> _T | None:
        """Return the result of ``work``; ``None``, and a problem among the findings, where it raises. Warnings become
        notes."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = work()
            except (SpecrsError, OSError, RuntimeError) as error:  # torch's own errors are of the latter
                self.findings.append(Finding(section, name, None, str(error), _remedy(error, remedy)))
                found = None
        for warning in caught:
            self.findings.append(Finding(section, name, note=str(warning.message)))
        return found

    @property
    def problems(self) -> list[Finding]:
        """The problems among all findings."""
        return [f for f in self.findings if f.problem is not None]


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    p = commands.add_parser("doctor", help="what this machine and these files can do", description=__doc__)
    options.add_models(p, positional=True)
    options.add_threads(p)
    options.add_engine(p)
    p.add_argument("--json", action="store_true", help="print everything as JSON")
    p.add_argument("--no-run", dest="try_head", action="store_false", help="load no weights: do not try the draft head")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look at everything."""
    options.set_threads(args)
    model, draft = args.model, args.draft
    if model is None:
        from specrs import assets

        model, draft = assets.model_dir(), assets.draft_dir() if draft is None else draft
    report = examined(model, draft, options.engine_options(args), args.try_head)
    print(json.dumps(_as_json(report), indent=1) if args.json else _as_text(report))
    return 1 if report.problems else 0


def examined(model: str | Path, draft: str | Path | None, given: EngineOptions, try_head: bool = True) -> Report:
    """Look at a model and perhaps its head.

    Args:
        given: options of the engine.
        try_head: have the head draft, where there is one and nothing speaks against it.

    Raises:
        ConfigError: an option that nothing could make right.
    """
    from specrs.engine.config import EngineConfig

    config = EngineConfig.of(given)
    report = Report()
    _machine(report)
    _devices(report)
    found = _model(report, model, config)
    head = None if draft is None or found is None else _head(report, draft, found[1])
    if found is not None and (draft is None or head is not None):
        drafts = _configuration(report, config, *found, head)
        if head is not None and drafts and try_head and not report.problems:
            _tried(report, found[0], head[0], given)
    return report


# -- what there is --------------------------------------------------------------------------------------------------


def _machine(report: Report) -> None:
    import torch

    from specrs import _specrs as core

    instructions, rule = core._numerics_ids()
    report.add("machine", "specrs", __version__)
    report.add("machine", "python", platform.python_version())
    report.add("machine", "torch", torch.__version__)
    note = "no vector instructions: kernels of the CPU are slow" if instructions == "scalar" else None
    report.add("machine", "cpu instructions", instructions, note)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    report.add("machine", "cpus of this process", allowed)
    report.add("machine", "threads of the kernels", num_threads())
    pages, each = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    report.add("machine", "memory", pages * each)
    if rule is not None:
        report.add("machine", "rule of attention on a GPU", rule)


def _devices(report: Report) -> None:
    """Report the GPUs; a missing one is a problem for a configuration that wants a GPU."""
    import torch

    from specrs import device
    from specrs.engine.devices.memory_plan import free_bytes
    from specrs.models.cuda import unavailable

    why = unavailable()
    if why is not None:
        report.add("gpu", "usable", False, why)
        return
    report.add("gpu", "usable", True)
    for i in range(torch.cuda.device_count()):
        section, at = f"gpu cuda:{i}", torch.device("cuda", i)
        report.add(section, "name", torch.cuda.get_device_name(i))
        remedy = "specrs needs compute capability 8.0 or later, and a driver of CUDA 13"
        capability = report.check(section, "kernels", lambda i=i: device.init(i), remedy)  # type: ignore[misc]
        if capability is None:
            continue
        report.add(section, "compute capability", f"{capability // 10}.{capability % 10}")
        report.add(section, "memory", torch.cuda.get_device_properties(i).total_memory)
        report.add(section, "free for an engine", free_bytes(at))
        remedy = "install torch built for CUDA 13, whose cublasLt specrs takes"
        products = report.check(section, "cublasLt", lambda i=i: device.products(i), remedy)  # type: ignore[misc]
        if products is not None:
            told = json.loads(products.numerics())
            report.add(section, "driver", f"CUDA {told['driver_cuda']}")
            report.add(section, "cublasLt", told["cublaslt"], told["cublaslt_path"])


# -- what the files are ---------------------------------------------------------------------------------------------


def _model(report: Report, given: str | Path, config: EngineConfig) -> tuple[Path, ModelConfig, bool] | None:
    """Directory and sizes of a model, and whether its weights fit them."""
    from specrs.engine.prompts import load_tokenizer
    from specrs.models import Checkpoint, LlamaModel, ModelConfig, default_sampling, locate

    section = "model"
    remedy = "give what the message names; docs/models.md says which models run"
    path = report.check(section, "directory", lambda: locate(given, "model", download=False), remedy)
    if path is None:
        return None
    report.add(section, "directory", str(path))
    remedy = "download the file that is named again, or correct it"
    sizes = report.check(section, "config.json", lambda: ModelConfig.from_directory(path), remedy)
    if sizes is None:
        return None
    report.add(section, "architecture", sizes.architecture)
    report.add(section, "layers", sizes.num_layers)
    report.add(section, "hidden size", sizes.hidden_size)
    report.add(section, "vocabulary", sizes.vocab_size)
    report.add(section, "context", sizes.max_context_len)
    if config.max_context_len is not None:
        remedy = f"--max-context {sizes.max_context_len} or less"
        report.check(section, "context", lambda: sizes.check_context(config.max_context_len or 1), remedy)
    remedy = "download the model again: hf download ORG/NAME --local-dir DIRECTORY"
    whole = report.check(section, "weights", lambda: LlamaModel.check_files(sizes, Checkpoint(path)) or True, remedy)
    if whole:
        weights = Checkpoint(path)
        report.add(section, "weights", weights.nbytes, weights.dtype("model.embed_tokens.weight"))
    remedy = "download tokenizer.json again"
    tokenizer = report.check(section, "tokenizer", lambda: load_tokenizer(path), remedy)
    if tokenizer is not None:
        tokens = tokenizer.get_vocab_size()
        more = tokens - sizes.vocab_size
        note = f"{more} tokens that the model does not have: prompts that hold one are refused" if more > 0 else None
        report.add(section, "tokenizer", tokens, note)
    elif not (path / "tokenizer.json").exists():
        note = "no tokenizer.json: prompts are token ids, outputs have no text"
        if (path / "tokenizer.model").exists():
            note += "; transformers makes one: AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL)"
        report.add(section, "tokenizer", None, note)
    remedy = "correct the file that is named, or give chat_template= with each conversation"
    templates = report.check(section, "chat templates", lambda: _templates(path), remedy)
    if templates is not None:
        note = None if templates.templates else "none: llm.chat needs chat_template="
        report.add(section, "chat templates", sorted(templates.templates), note)
    remedy = "correct or remove generation_config.json"
    sampling = report.check(section, "default sampling", lambda: default_sampling(path).resolved(), remedy)
    if sampling is not None:
        report.add(section, "default sampling", str(sampling))
    return path, sizes, bool(whole)


def _templates(path: Path) -> ChatTemplates:
    """The model's, each of them parsed. Raises ChatTemplateError."""
    from specrs.chat import ChatTemplateError, ChatTemplates
    from specrs.chat.dialect import environment

    found = ChatTemplates.of(path)
    for name, source in found.templates.items():
        try:
            environment().parse(source)
        except Exception as error:  # jinja2's own, which is not imported here
            at = getattr(error, "lineno", None)
            raise ChatTemplateError(f"{path}: chat template {name!r}, line {at}: {error}") from error
    return found


def _head(report: Report, given: str | Path, sizes: ModelConfig) -> tuple[Path, HeadConfig] | None:
    from specrs.models import check_draft, drafted_tokens, locate
    from specrs.models.head_config import parts

    section = "draft head"
    remedy = "give what the message names; docs/models.md says which heads run"
    path = report.check(section, "directory", lambda: locate(given, "draft", download=False), remedy)
    if path is None:
        return None
    report.add(section, "directory", str(path))
    remedy = "download the head again: hf download ORG/NAME --local-dir DIRECTORY"
    checked = report.check(section, "fits the model", lambda: check_draft(path, sizes), remedy)
    if checked is None:
        return None
    config, shapes = checked
    mapped = report.check(section, "vocabulary map", lambda: drafted_tokens(path, sizes), remedy)
    if mapped is None:
        return None
    report.add(section, "fits the model", True)
    report.add(section, "form", f"{config.form_name}, as written by {config.form.trainer}", parts(config, shapes))
    for note in config.notes:
        report.add(section, "config.json", None, note)
    report.add(section, "hidden size", config.hidden_size)
    report.add(section, "features of layers", list(config.aux_layers_for(sizes)))
    report.add(section, "vocabulary", mapped, f"of {sizes.vocab_size} tokens: others are never drafted")
    return path, config


def _configuration(
    report: Report,
    config: EngineConfig,
    model: Path,
    sizes: ModelConfig,
    whole: bool,
    head: tuple[Path, HeadConfig] | None,
) -> bool:
    """Report what an engine would be; returns whether it would draft by a head."""
    from specrs.engine.devices.placing import Wanted
    from specrs.engine.drafting.sources import Source
    from specrs.models import cache_bytes, has_recurrent_state
    from specrs.models.host_memory import head_bytes, target_bytes

    section = "configuration"
    recurrent = has_recurrent_state(model)
    config = config.drafting(head is not None)  # the command names none, so there is nothing to refuse
    remedy = "change the option that is named; the message says what works"
    wanted = Wanted(config, model, sizes, None if head is None else head[0], recurrent)
    site = report.check(section, "runs", wanted.site, remedy)
    if site is None:
        return False
    c = site.config
    assert c.num_pages is not None and c.kv_dtype is not None
    report.add(section, "runs on", site.name)
    report.add(section, "computes in", site.place.dtype_name)
    names = [d if isinstance(d, str) else type(Source.of(d).drafter).__name__ for d in c.drafters or ()]
    report.add(section, "drafts by", names, None if names else "decodes plainly")
    tree = c.head_shape
    report.add(section, "tree", "auto" if c.adaptive else [tree.topk, tree.steps, tree.draft_tokens])
    report.add(section, "requests at once", c.max_batch)
    report.add(section, "context", c.max_context_len)
    pool = c.num_pages * c.page_size
    report.add(section, "KV pool, tokens", pool, f"{c.num_pages} pages of {c.page_size}, {c.kv_dtype}")
    if site.budget is not None:
        for name, size in site.budget.lines:
            report.add("memory", name, size)
        report.add("memory", "KV pool", site.budget.pages * site.budget.page_bytes)
        report.add("memory", "in all", site.budget.bytes, f"{human(site.budget.have)} were free")
        return site.drafts
    kv = cache_bytes(sizes, sizes.num_layers, c.num_pages + 1, c.page_size, c.kv_dtype)
    if not whole:
        return False  # nothing to count
    weights = target_bytes(sizes, model, site.place)
    report.add("memory", "weights of the target", weights)
    report.add("memory", "KV pool of the target", kv)
    if head is not None and site.drafts:
        directory, its = head
        kv_head = cache_bytes(its, its.num_layers, c.num_pages + 1, c.page_size, c.kv_dtype)
        weights_head = head_bytes(its, directory, site.place)
        report.add("memory", "weights of the draft head", weights_head)
        report.add("memory", "KV pool of the draft head", kv_head)
        kv, weights = kv + kv_head, weights + weights_head
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if weights + kv > there:
        problem = f"{human(weights + kv)} are needed; the machine has {human(there)}"
        remedy = "a smaller --max-batch, --max-context or --num-pages, or --kv-dtype bfloat16, takes less"
        report.findings.append(Finding("memory", "in all", weights + kv, problem, remedy))
    return site.drafts


def _tried(report: Report, model: Path, draft: Path, given: EngineOptions) -> None:
    """Report how often the head's first guess is the next token of a text that the model writes.

    No shape tells a head of another model of the same sizes, or features of a wrong layer: drafts are refused, and the
    text is right all the same.
    """
    from specrs.engine import LLM
    from specrs.sampling_params import SamplingParams

    def work() -> float:
        options: EngineOptions = {**given, "tree": (1, 1, 2), "max_batch": 1, "drafters": ["head"]}
        params = SamplingParams(max_tokens=_TRIED, ignore_eos=True, seed=0)
        with LLM(model, draft, progress=False, **options) as llm:
            prompt: Any = "The"
            if llm.tokenizer is None:
                prompt = [min(llm.eos_ids, default=0)]
            elif "default" in llm.chat_templates.templates:  # such a model writes nothing sensible without it
                prompt = llm.chat_prompt([{"role": "user", "content": "Tell me about the sea."}])
            [output] = llm.generate([prompt], params)
        return sum(output.drafted) / max(output.proposed, 1)

    name, remedy = "first drafts accepted", "a smaller --max-batch, or --no-run, which does not try the head"
    share = report.check("draft head at work", name, work, remedy)
    if share is None:
        return
    value = f"{share:.0%} over {_TRIED} tokens"
    if share < _LEAST_ACCEPTED:
        problem = f"{value}: the head does not seem to be trained for this model"
        remedy = "give this model's own head; where it is, see that config.json names the layers that it was trained on"
        report.findings.append(Finding("draft head at work", name, value, problem, remedy))
    else:
        report.add("draft head at work", name, value)


# -- telling --------------------------------------------------------------------------------------------------------


def _as_json(report: Report) -> dict[str, Any]:
    sections: dict[str, list[dict[str, Any]]] = {}
    for f in report.findings:
        told = {"name": f.name, "value": f.value, "problem": f.problem, "remedy": f.remedy, "note": f.note}
        sections.setdefault(f.section, []).append(told)
    return {"ok": not report.problems, "problems": len(report.problems), "sections": sections}


def _as_text(report: Report) -> str:
    lines, section = [], None
    width = max(len(f.name) for f in report.findings)
    for f in report.findings:
        if f.section != section:
            lines.append(f"{'' if section is None else chr(10)}{f.section}")
            section = f.section
        if f.problem is not None:
            lines += [f"  {f.name:{width}}  PROBLEM: {f.problem}", f"  {'':{width}}  remedy: {f.remedy}"]
            continue
        value = _shown(f)
        lines.append(f"  {f.name:{width}}  {value}{'' if f.note is None else f'{value and chr(32)}({f.note})'}")
    count = len(report.problems)
    lines.append("\n" + ("No problems." if not count else f"{count} problem{'s' if count > 1 else ''}."))
    return "\n".join(lines)


def _shown(f: Finding) -> str:
    if f.value is None:
        return ""
    if isinstance(f.value, bool):
        return "yes" if f.value else "no"
    if isinstance(f.value, int) and (f.section == "memory" or f.name in ("memory", "free for an engine", "weights")):
        return human(f.value)
    if isinstance(f.value, list):
        return ", ".join(map(str, f.value)) or "none"
    return f"{f.value:,}" if isinstance(f.value, int) else str(f.value)
