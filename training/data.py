"""Stage 1: the corpus, the held-out split, the tokenizer and the held-out prompts.

The corpus is the Python standard library's source, as installed beside the interpreter that runs this script (PSF
licence). About one file in twenty, chosen by a hash of its relative path, is held out of everything that trains.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import re
import sys
import sysconfig
import textwrap
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .config import BOS, SEED, TargetConfig

# Tables of characters and a dump of the manual teach a model of this size nothing about code.
SKIPPED = ("encodings/", "pydoc_data/", "test/encoded_modules/", "lib2to3/tests/data/", "test/cjkencodings/")
LIB, TEST, SNIPPET, HELD_OUT = range(4)

# Newlines stay single and indentation is a token of its own, so that a prompt may end after either.
PRETOKEN = r" {2,}|\t+|\n| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s"


def draw(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return hashlib.sha256(text.encode()).digest()[1] / 256


def is_held_out(path: str) -> bool:
    """One file in twenty, by the hash of its relative path."""
    return hashlib.sha256(path.encode()).digest()[0] % 20 == 0


def normalise(text: str) -> str:
    """Unix newlines, no trailing blanks, at most two blank lines in a row."""
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\f", "").lstrip("\ufeff").split("\n")]
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip("\n") + "\n"


def is_table(text: str) -> bool:
    """True of files that are mostly numbers or escapes."""
    dense = sum(c.isdigit() or c == "\\" for c in text)
    return dense > 0.12 * len(text) or max(map(len, text.split("\n"))) > 2000


def standard_library() -> list[tuple[str, str]]:
    """(relative path, normalised text) of every usable file, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if "site-packages" in path or "dist-packages" in path or path.startswith(SKIPPED):
            continue
        try:
            text = normalise(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        if len(text) > 64 and not is_table(text):
            found.append((path, text))
    return found


def snippets(text: str, low: int = 3, high: int = 120) -> list[str]:
    """Functions and classes cut out of a file and moved to column 0, so that a bare `def` is a natural beginning."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    lines = text.split("\n")
    cut = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.end_lineno is None:
            continue
        if low <= node.end_lineno - node.lineno + 1 <= high:
            cut.append(textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n")
    return cut


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; every encoding begins with the BOS, which also ends a document and pads."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    tok.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    return tok


def natural_cuts(text: str) -> list[int]:
    """Offsets where a person might stop typing: after a `def` or `class` line, a docstring, a blank line, an import."""
    ends = []
    offset, previous = 0, ""
    for line in text.split("\n"):
        offset += len(line) + 1
        bare = line.strip()
        opens = re.match(r"(async def|def|class|if|for|with|try|else)\b.*:$", bare)
        closes = bare.endswith('"""') or bare.startswith(("import ", "from ")) or (not bare and previous)
        if opens or closes:
            ends.append(offset - 1 if opens else offset)
        previous = bare
    return ends


def held_out_prompts(files: list[tuple[str, str]], tok: Tokenizer, count: int) -> list[dict[str, object]]:
    """`count` prompts of 40 to 200 tokens: beginnings of held-out files and of definitions inside them."""
    rng = random.Random(SEED)
    pool = list(files)
    rng.shuffle(pool)
    prompts: list[dict[str, object]] = []
    while len(prompts) < count:
        path, text = pool[len(prompts) % len(pool)]
        starts = [text, *snippets(text, low=8, high=400)] if len(prompts) % 4 == 0 else snippets(text, low=8, high=400)
        rng.shuffle(starts)
        for body in starts:
            fits = [end for end in natural_cuts(body) if 40 <= len(tok.encode(body[:end]).ids) <= 200]
            if fits:
                prompt = body[: rng.choice(fits)]
                n = len(tok.encode(prompt).ids)
                prompts.append({"id": len(prompts), "source": path, "tokens": n, "prompt": prompt})
                break
        else:
            pool.pop(len(prompts) % len(pool))
    return prompts


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--work", type=Path, required=True, help="folder for intermediate files")
    args.add_argument("--assets", type=Path, required=True, help="python/specrs/assets")
    args.add_argument("--model", type=Path, required=True, help="the target's folder, for tokenizer.json")
    opts = args.parse_args()
    for folder in (opts.work, opts.assets, opts.model):
        folder.mkdir(parents=True, exist_ok=True)

    files = standard_library()
    held = [f for f in files if is_held_out(f[0])]
    kept = [f for f in files if not is_held_out(f[0])]
    listing = Path(__file__).parent / "heldout.txt"
    listing.write_text("".join(f"{path}\n" for path, _ in held))

    docs: list[tuple[int, str]] = []
    seen = set()
    for path, text in kept:
        kind = TEST if "test" in path else LIB
        docs.append((kind, text))
        for body in snippets(text):
            if body not in seen and (kind == LIB or draw(body) < 0.4):
                seen.add(body)
                docs.append((SNIPPET, body))
    tok = train_tokenizer([text for _, text in kept], TargetConfig().vocab_size)
    tok.save(str(opts.model / "tokenizer.json"))

    with (opts.work / "corpus.jsonl").open("w") as corpus:  # what the head is trained on
        for kind, text in docs:
            corpus.write(json.dumps({"kind": ("library", "tests", "definitions")[kind], "text": text}) + "\n")
    docs += [(HELD_OUT, text) for _, text in held]
    encoded = [np.array(e.ids, dtype=np.uint16) for e in tok.encode_batch([text for _, text in docs])]
    kinds = np.array([kind for kind, _ in docs], dtype=np.uint8)
    offsets = np.cumsum([0, *map(len, encoded)])
    np.savez_compressed(opts.work / "tokens.npz", ids=np.concatenate(encoded), offsets=offsets, kinds=kinds)

    prompts = held_out_prompts(held, tok, 64)
    (opts.assets / "heldout_prompts.json").write_text(json.dumps(prompts, indent=1) + "\n")
    sizes = {
        name: int(sum(len(e) for e, k in zip(encoded, kinds, strict=True) if k == kind))
        for name, kind in (("lib", LIB), ("test", TEST), ("snippets", SNIPPET), ("held_out", HELD_OUT))
    }
    stats = {
        "python": sys.version.split()[0],
        "files": len(files),
        "held_out_files": len(held),
        "characters": sum(len(text) for _, text in files),
        "tokens": sizes,
        "held_out_characters": sum(len(text) for _, text in held),
    }
    (opts.work / "data.json").write_text(json.dumps(stats, indent=1) + "\n")
    print(json.dumps(stats))


if __name__ == "__main__":
    main()
