"""Options that several subcommands share: models, the engine's options, threads, sampling."""

from __future__ import annotations

import argparse
from typing import Any, cast

from specrs._specrs import ConfigError, TreeShape, set_num_threads
from specrs.engine_options import OPTIONS, EngineOptions, default_of, flags_of, value_of
from specrs.sampling_params import SamplingParams

_FORMER = ("--topk", "--steps", "--draft-tokens")  # former options, now parts of --tree
_MODEL = "Hugging Face directory, org/name or org/name@revision (default: the small model in the package)"


class _FormerOption(argparse.Action):
    """An option that has another name now."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        parser.error(f"{option}: the tree is one option, --tree K,S,V, as --tree 4,4,16")


class _Once(argparse.Action):
    """A value that has two spellings, MODEL and --model, and is given by one of them."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest, None)
        if before is not None and before != values:
            parser.error(f"MODEL {before!r} and {values!r}: one model, as MODEL or as --model MODEL")
        setattr(namespace, self.dest, values)


def add_models(parser: argparse.ArgumentParser, positional: bool = False) -> None:
    """Declare --model and --draft; ``positional`` as for `add_model`."""
    add_model(parser, positional)
    parser.add_argument("--draft", metavar="HEAD", help="directory, or org/name, of a draft head for the model")


def add_model(parser: argparse.ArgumentParser, positional: bool = False) -> None:
    """Declare --model.

    positional: MODEL may stand without --model too, where no other argument does.
    """
    if positional:
        parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, action=_Once, help=_MODEL)
    parser.add_argument("--model", metavar="MODEL", action=_Once, help="the same" if positional else _MODEL)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Declare a flag for each of the engine's options; `engine_options` reads those that were given."""
    group = parser.add_argument_group("engine (docs/options.md)")
    for name, one in OPTIONS.items():
        if name == "tree":
            add_tree(group)
        elif one.kind is bool:
            group.add_argument(
                *flags_of(name), dest=name, action="store_false", default=None, help=f"do not {one.about}"
            )
        else:  # values are the engine's to check: its errors name the option and what would do
            group.add_argument(
                *flags_of(name), dest=name, type=one.kind, metavar=value_of(name),
                help=f"{one.about} (default: {default_of(name)})",
            )  # fmt: skip


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """Return the options that were given to the parser of `add_engine`, as `specrs.LLM` takes them.

    Raises:
        ConfigError: a tree that there cannot be.
    """
    given = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
    if "tree" in given:
        given["tree"] = tree_of(given["tree"])
    if "drafters" in given:
        given["drafters"] = [name.strip() for name in given["drafters"].split(",") if name.strip()]
    return cast(EngineOptions, given)


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Declare --threads."""
    parser.add_argument("--threads", type=int, metavar="N",
                        help="threads of the CPU kernels, 1 to 64 (default: OMP_NUM_THREADS, or the CPUs of this "
                             "process, at most 8)")  # fmt: skip


def set_threads(args: argparse.Namespace) -> None:
    """Do what `add_threads` declared.

    Raises:
        ConfigError: a number out of range.
    """
    if args.threads is not None:
        set_num_threads(args.threads)


def add_sampling(parser: Any) -> None:
    """Declare the options of `sampling_of`."""
    group = parser.add_argument_group("sampling (default: as the model's generation_config.json says, else greedy)")
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help="most tokens to generate (default: the model's, or 128)"
    )
    heat = group.add_mutually_exclusive_group()
    heat.add_argument("--temperature", type=float, metavar="T", help="0 is greedy decoding")
    heat.add_argument("--greedy", action="store_const", dest="temperature", const=0.0, help="as --temperature 0")
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K most probable tokens; 0 keeps all")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the most probable tokens up to this mass")
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens below this fraction of the top one")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1: repeat less; 1 is none")
    group.add_argument("--seed", type=_seed, default=0,
                       help="same seed, same text; 'random': another one every time (default: 0)")  # fmt: skip
    group.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the output; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on beyond the model's end of text")


def _seed(text: str) -> int | None:
    return None if text == "random" else int(text)


_SAMPLING = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos",
)  # fmt: skip


def sampling_of(args: argparse.Namespace, **more: Any) -> SamplingParams:
    """Return the parameters that were given to the parser of `add_sampling`; the model decides the rest. more: fields
    that go before the command line's.

    Raises:
        ConfigError: a value out of range, or no field of `SamplingParams`.
    """
    return SamplingParams.from_dict({**{name: getattr(args, name) for name in _SAMPLING}, **more})


def add_tree(parser: Any, default: str | None = None, nodes: bool = True) -> None:
    """Declare --tree; ``nodes``: whether V must be given."""
    one = OPTIONS["tree"]
    parser.add_argument(
        *flags_of("tree"), metavar=one.metavar if nodes else "K,S[,V]", default=default,
        help=f"{one.about} (default: {default or one.unset})",
    )  # fmt: skip
    for name in _FORMER:
        parser.add_argument(name, action=_FormerOption, nargs="?", help=argparse.SUPPRESS)


def tree_of(text: str, nodes: bool = True) -> TreeShape:
    """The tree that --tree names.

    Args:
        text: ``"K,S,V"``.
        nodes: true if V must be given; else a V that is not given is 1 + K * S, as far as the tree goes.

    Raises:
        ConfigError: the text has no such numbers, or a shape that no tree can have.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) == 2 and not nodes:
        k, s = numbers
        numbers.append(max(min(1 + k * s, 1 + k + (s - 1) * k * k), 1))
    if len(numbers) != 3:
        need = "K,S,V, as 4,4,16" if nodes else "K,S,V or K,S, as 3,6"
        raise ConfigError(f"--tree {text!r}: must be {need}")
    try:
        return TreeShape(*numbers)
    except ConfigError as e:  # the core names its own operand
        e.args = (f"--tree {text}: {e}",)
        raise
