"""The user's text and prompts: documents of named kinds, of which about one in twenty is held out of training.

A document is a file, a line of a `.jsonl` file, or a section of a long text. Whether it is held out depends on its text
alone, so that a document is on the same side in every run, and twice the same document is never on both.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Generic, TypeVar

from specrs._specrs import ConfigError

_SECTION = 16_384  # characters of a section
_HELD_OUT = 20

_T = TypeVar("_T")


@dataclass(frozen=True)
class Document(Generic[_T]):
    """One document.

    Attributes:
        kind: name of the sort of text that it is.
        content: its text, or a prompt.
        digest: SHA-256 of kind and content, in hexadecimal.
    """

    kind: str
    content: _T
    digest: str

    @classmethod
    def of(cls, kind: str, content: _T) -> Document[_T]:
        """Make a document of content that JSON can have."""
        text = json.dumps([kind, content], ensure_ascii=False, sort_keys=True)
        return cls(kind, content, hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest())


def in_turns(documents: Sequence[Document[_T]]) -> Iterator[Document[_T]]:
    """Yield documents, of each kind one at a time: those at the front are of all kinds, however many these have."""
    kinds: dict[str, list[Document[_T]]] = defaultdict(list)
    for document in documents:
        kinds[document.kind].append(document)
    for row in zip_longest(*kinds.values()):
        yield from (document for document in row if document is not None)


@dataclass(frozen=True)
class Documents(Generic[_T]):
    """Documents on both sides of the split.

    Attributes:
        left_out: number of files of directories that are no text.
    """

    kept: tuple[Document[_T], ...] = ()
    held_out: tuple[Document[_T], ...] = ()
    left_out: int = 0

    @classmethod
    def of(cls, found: Iterable[Document[_T]]) -> Documents[_T]:
        """Split documents; the same one twice counts once.

        A kind of which the hash holds out nothing gives its document with the least hash, if it has two or more.
        """
        kinds: dict[str, dict[str, Document[_T]]] = defaultdict(dict)
        for document in found:
            kinds[document.kind][document.digest] = document
        kept: list[Document[_T]] = []
        held: list[Document[_T]] = []
        for documents in kinds.values():
            out = {digest for digest in documents if int(digest[:8], 16) % _HELD_OUT == 0}
            if not out and len(documents) > 1:
                out = {min(documents)}
            for document in documents.values():
                (held if document.digest in out else kept).append(document)
        return cls(tuple(kept), tuple(held))

    def __len__(self) -> int:
        return len(self.kept) + len(self.held_out)

    @property
    def digest(self) -> str:
        """SHA-256 of all documents, whatever their order."""
        digests = sorted(d.digest for d in (*self.kept, *self.held_out))
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def read_text(paths: Sequence[str]) -> Documents[str]:
    """Read files, and all files below directories.

    A `.jsonl` file has a document a line: a text, or an object with ``text``, and perhaps ``kind``. Any other file is
    one document, or several where it is long. Kinds are names of folders: a file's kind is the folder of a directory
    that it is in, or the directory itself; a file that is named has its own name.

    Raises:
        ConfigError: a path that is not there, a named file that is not UTF-8, a line that is no document; no text.
    """
    found: list[Document[str]] = []
    left_out = 0
    for name in paths:
        path = Path(name)
        if path.is_dir():
            for file in sorted(p for p in path.rglob("*") if p.is_file()):
                within = file.relative_to(path).parts
                kind = within[0] if len(within) > 1 else path.resolve().name
                try:
                    found += _documents(file, kind)
                except UnicodeDecodeError:  # a directory of sources has pictures too
                    left_out += 1
        elif path.is_file():
            try:
                found += _documents(path, path.stem)
            except UnicodeDecodeError as e:
                raise ConfigError(f"text = {name!r}: not UTF-8: {e}") from None
        else:
            raise ConfigError(f"text = {name!r}: no such file or directory")
    if paths and not found:
        raise ConfigError(f"text = {list(paths)!r}: no documents")
    return replace(Documents.of(found), left_out=left_out)


def _documents(path: Path, kind: str) -> Iterator[Document[str]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        for section in _sections(text):
            yield Document.of(kind, section)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as e:
            raise ConfigError(f"{path}, line {number}: not JSON: {e}") from None
        said: Any = {"text": value} if isinstance(value, str) else value
        if not isinstance(said, dict) or not isinstance(said.get("text"), str):
            raise ConfigError(f"{path}, line {number}: must be a text, or an object with 'text', a text")
        for section in _sections(said["text"]):
            yield Document.of(str(said.get("kind") or kind), section)


def _sections(text: str) -> Iterator[str]:
    """The text in sections that end with a line, as far as there are lines."""
    while text.strip():
        end = len(text)
        if end > _SECTION:
            end = text.rfind("\n", 0, _SECTION) + 1 or _SECTION
        yield text[:end]
        text = text[end:]
