"""Options that several subcommands share: models, threads, sampling, the tree, attention."""

from __future__ import annotations

import argparse
from typing import Any

from specrs._specrs import ConfigError, TreeShape, set_num_threads
from specrs.backends import BACKENDS
from specrs.backends.base import DRAFT_ATTENTIONS, LAYOUTS
from specrs.sampling_params import SamplingParams

_FORMER = ("--topk", "--steps", "--draft-tokens")  # of --tree


class _FormerOption(argparse.Action):
    """An option that has another name now."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        parser.error(f"{option}: the tree is one option, --tree K,S,V, as --tree 4,4,16")


def add_models(parser: argparse.ArgumentParser) -> None:
    """Declare --model and --draft."""
    parser.add_argument("--model", help="Hugging Face directory; default: the small model in the package")
    parser.add_argument("--draft", help="directory of an EAGLE head for the model")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Declare --device."""
    parser.add_argument("--device", metavar="NAME",
                        help="cpu, cuda or cuda:N (default: SPECRS_DEVICE, else a GPU where one is that runs the "
                             "model and holds it, else the CPU)")  # fmt: skip


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


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """Of `add_sampling`; what was not given is left to the model."""
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos")
    return SamplingParams(**{name: getattr(args, name) for name in names})


def add_tree(parser: Any, default: str | None = None, nodes: bool = True) -> None:
    """Declare --tree; ``nodes``: whether V must be given."""
    parser.add_argument(
        "--tree", metavar="K,S,V" if nodes else "K,S[,V]", default=default,
        help="branches kept per draft step, draft steps, tokens verified per request with the root "
             f"(default: {default or 'picked every round by a measured cost model'})",
    )  # fmt: skip
    for name in _FORMER:
        parser.add_argument(name, action=_FormerOption, nargs="?", help=argparse.SUPPRESS)


def tree_of(text: str, nodes: bool = True) -> TreeShape:
    """The tree that --tree names.

    Args:
        text: ``"K,S,V"``.
        nodes: whether V must be given; else it is 1 + K * S where it is not, as far as the tree goes.

    Raises:
        ConfigError: no such numbers, or a tree that there cannot be.
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


def add_attention(parser: Any) -> None:
    """Declare --page-size, --attention-backend, --draft-layout and --draft-attention."""
    parser.add_argument("--page-size", type=int, default=16, help="tokens per KV page (default: %(default)s)")
    parser.add_argument("--attention-backend", default="native", metavar="NAME",
                        help=f"whose attention and metadata: {', '.join(BACKENDS)} (default: %(default)s)")  # fmt: skip
    parser.add_argument("--draft-layout", choices=LAYOUTS,
                        help="where a round's draft KV lies: dense, or each branch on pages of its own "
                             "(default: what the backend reads)")  # fmt: skip
    parser.add_argument("--draft-attention", choices=DRAFT_ATTENTIONS,
                        help="a branch attends to its ancestors, or to its own lane (default: ancestors, "
                             "wherever the backend can)")  # fmt: skip


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Of `add_device`, `add_tree` and `add_attention`, as `specrs.LLM` takes them."""
    return {
        "device": args.device,
        "tree": None if args.tree is None else tree_of(args.tree),
        "page_size": args.page_size,
        "attention_backend": args.attention_backend,
        "draft_layout": args.draft_layout,
        "draft_attention": args.draft_attention,
    }
