"""Writes prompts of several kinds for `specrs train-head` with a chat model, made of what Python itself comes with.

    python -m training.prompts [--each 600] [--questions KIND=FILE.jsonl:FIELD ...] > prompts.jsonl

``--questions`` adds prompts from a file that you have, a field of each line.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

_PASSAGE = 1800  # characters of a passage


def _sources() -> Iterator[tuple[str, ast.Module, str]]:
    """Name, tree and text of the interpreter's own modules."""
    for path in sorted(Path(inspect.__file__).parent.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        yield path.stem, ast.parse(text), text


def _documented(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and documentation of functions and methods."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (said := ast.get_docstring(node)) and len(said) > 40:
            yield node.name, said


def _sums(rng: random.Random) -> str:
    """A question of arithmetic in words."""
    name, thing = rng.choice(["Ada", "Ben", "Chen", "Dina", "Emil"]), rng.choice(["apples", "books", "coins", "stamps"])
    a, b, c = rng.randint(3, 60), rng.randint(2, 12), rng.randint(1, 9)
    return rng.choice([
        f"{name} has {a} {thing} and buys {b} boxes with {c} {thing} in each. How many {thing} does {name} have now?",
        f"{name} sells {a} {thing} for {b} dollars each, and pays {c} dollars for the table. How much is left?",
        f"A shop has {a * b} {thing} on {b} shelves. {name} takes {c} from each shelf. How many are left on a shelf?",
    ])  # fmt: skip


def prompts(each: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Kind and text of prompts, as many of each kind as there are, but ``each`` at most."""
    rng = random.Random(seed)
    modules = list(_sources())
    passages = [text[i : i + _PASSAGE] for text in topics.values() for i in range(0, len(text), 2 * _PASSAGE)]
    documented = [pair for _, tree, _ in modules for pair in _documented(tree)]
    names = sorted({name for _, tree, _ in modules for name, _ in _documented(tree)})
    code = [ast.get_source_segment(text, node) or "" for _, tree, text in modules for node in tree.body
            if isinstance(node, ast.FunctionDef)]  # fmt: skip
    code = [one for one in code if 200 < len(one) < _PASSAGE]
    words = sorted({word for text in passages for word in text.split() if word.isalpha() and len(word) > 6})
    kinds: dict[str, list[str]] = {
        "explain": [f"Explain {name.replace('_', ' ')} to a beginner, with an example." for name in [*topics, *names]],
        "write": [f"Write a short {form} in which a {word.lower()} matters." for word in words
                  for form in ("story", "letter", "speech")],
        "summarise": [f"Summarize:\n\n{passage}" for passage in passages],
        "code": [f"Write a Python function `{name}` with this documentation:\n\n{said[:600]}"
                 for name, said in documented],
        "review": [f"What does this code do, and what would you change?\n\n```python\n{one}\n```" for one in code],
        "answer": [f"{passage}\n\nQuestion: what does this text say of {word}?" for passage in passages
                   for word in sorted({w for w in passage.split() if w.isalpha() and len(w) > 7})[:3]],
        "sums": sorted({_sums(rng) for _ in range(4 * each)}),
    }  # fmt: skip
    for kind, texts in kinds.items():
        for text in rng.sample(texts, min(each, len(texts))):
            yield kind, text


def main() -> None:
    """Write them, all kinds mixed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=600, metavar="N", help="prompts of a kind, at most")
    parser.add_argument("--questions", nargs="*", default=[], metavar="KIND=FILE:FIELD")
    args = parser.parse_args()
    found = list(prompts(args.each))
    rng = random.Random(1)
    for one in args.questions:
        kind, _, rest = one.partition("=")
        path, _, name = rest.rpartition(":")
        lines = [json.loads(line)[name] for line in Path(path).read_text(encoding="utf-8").splitlines()]
        found += [(kind, text) for text in rng.sample(lines, min(args.each, len(lines)))]
    rng.shuffle(found)
    for kind, text in found:
        sys.stdout.write(json.dumps({"kind": kind, "messages": [{"role": "user", "content": text}]}) + "\n")


if __name__ == "__main__":
    main()
