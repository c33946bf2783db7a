"""Drafts from texts that the operator gives."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from os import PathLike
from typing import Any

from specrs._specrs import ConfigError, CorpusDrafts, DraftCorpus, DraftProposal
from specrs.drafters.protocol import DraftRequest


class CorpusDrafter:
    """A source of drafts from a corpus of documents, code, or answers that are often quoted: it proposes what followed
    the request's last tokens there.

    The corpus is a file, written once by `CorpusDrafter.build` and mapped into memory: processes that open it share its
    pages. Nothing of a request enters it. While it is open the file must not be changed in place; building another one
    over it is safe, and is seen by whoever opens it afterwards.

    Args:
        path: the file.
        depth: levels below the last token that it proposes at most.
        verify: read the whole file first, and refuse a damaged one.
        name: name of the source in warnings and counts; two corpora of an engine have different names.

    Raises:
        ConfigError: the file cannot be read, or is no corpus; the message has the path, and what is wrong.
    """

    def __init__(
        self, path: str | PathLike[str], *, depth: int = 32, verify: bool = True, name: str = "corpus"
    ) -> None:
        self.corpus, self.depth, self.name = DraftCorpus(path, verify), depth, name
        self._made = os.path.abspath(path), verify

    def __reduce__(self) -> tuple[Any, ...]:
        path, verify = self._made  # another process maps the same file
        return partial(type(self), path, depth=self.depth, verify=verify, name=self.name), ()

    @staticmethod
    def build(path: str | PathLike[str], documents: Iterable[Sequence[int]], vocab_size: int) -> None:
        """Write the file of some documents, each a sequence of tokens, none empty. It takes 8 bytes a token on disk
        and, while it is sorted, 12 in memory. A file that is there is replaced at once, when all is written.

        Raises:
            ConfigError: a document is no sequence of tokens, or empty, or there is none; a token is outside the
                vocabulary; the file cannot be written. No part of it is left.
        """
        import torch  # needed only to hand the tokens over without a copy

        tokens, ends = array("i"), list[int]()
        for i, document in enumerate(documents):
            try:
                tokens.extend(document)
            except (TypeError, OverflowError) as e:
                raise ConfigError(f"documents[{i}]: {e}; a document is a sequence of tokens") from None
            if len(tokens) == (ends[-1] if ends else 0):
                raise ConfigError(f"documents[{i}] is empty: each document of a corpus has tokens")
            ends.append(len(tokens))
        assert tokens.itemsize == 4
        flat = torch.frombuffer(tokens, dtype=torch.int32) if ends and ends[-1] else torch.empty(0, dtype=torch.int32)
        DraftCorpus.build(path, vocab_size, flat, ends)

    def begin(self, request: DraftRequest) -> CorpusDrafting:
        """The request's place in the corpus, behind its prompt."""
        drafts = CorpusDrafts(self.corpus, request.vocab_size)
        drafts.extend(request.prompt[-_FOLLOWED:])
        return CorpusDrafting(drafts)


_FOLLOWED = 64  # tokens of a prompt: no match is longer


class CorpusDrafting:
    """One request's place in a corpus."""

    def __init__(self, drafts: CorpusDrafts) -> None:
        self._drafts: CorpusDrafts | None = drafts

    @property
    def matched(self) -> int:
        """Tokens of the longest suffix of the text that occurs in the corpus, of at most 63."""
        return self._live().matched

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens that were committed."""
        self._live().extend(tokens)

    def propose(self, nodes: int, depth: int, after: Sequence[int] = ()) -> DraftProposal:
        """Return a proposal of what may follow the text, or the path ``after`` behind it."""
        return self._live().propose(nodes, depth, after)

    def bytes(self) -> int:
        """Memory that it holds beside the mapped file: none to speak of."""
        return 0

    def close(self) -> None:
        """Let go of the corpus."""
        self._drafts = None

    def _live(self) -> CorpusDrafts:
        if self._drafts is None:
            raise RuntimeError("this drafting was closed: begin() another")
        return self._drafts
