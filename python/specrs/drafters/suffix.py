"""Drafts from a request's own prediction, prompt and output."""

from __future__ import annotations

from collections.abc import Sequence

from specrs._specrs import DraftProposal, SuffixDrafts
from specrs.drafters.protocol import DraftRequest


class SuffixDrafter:
    """A source of drafts from the request's own text: it proposes what followed the last tokens where they stood
    before. Requests share nothing.

    Args:
        limit: most bytes of a request. A token takes about 50, so the default follows over a million tokens; the older
            half of a longer text is forgotten.
        depth: levels below the last token that it proposes at most.

    Raises:
        ConfigError: a limit in which nothing fits, or which no automaton reaches; the message has the range.
    """

    name = "suffix"

    def __init__(self, *, limit: int = 64 << 20, depth: int = 32) -> None:
        SuffixDrafts(1, limit)  # refuses a limit now, rather than each request's drafting
        self.limit, self.depth = limit, depth

    def begin(self, request: DraftRequest) -> SuffixDrafting:
        """Begin with the request's text so far: its prediction, then its prompt."""
        drafts = SuffixDrafts(request.vocab_size, self.limit, request.prediction)
        drafts.prompt(request.prompt)
        return SuffixDrafting(drafts)


class SuffixDrafting:
    """One request's automaton."""

    def __init__(self, drafts: SuffixDrafts) -> None:
        self._drafts: SuffixDrafts | None = drafts

    @property
    def matched(self) -> int:
        """Tokens of the longest suffix of the text that occurred before."""
        return self._live().matched

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens that were committed."""
        self._live().extend(tokens)

    def propose(self, nodes: int, depth: int, after: Sequence[int] = ()) -> DraftProposal:
        """Return a proposal of what may follow the text, or the path ``after`` behind it (such as a leaf of another
        source's tree)."""
        return self._live().propose(nodes, depth, after)

    def bytes(self) -> int:
        """Memory that it holds."""
        return 0 if self._drafts is None else self._drafts.bytes

    def close(self) -> None:
        """Free the automaton."""
        self._drafts = None

    def _live(self) -> SuffixDrafts:
        if self._drafts is None:
            raise RuntimeError("this drafting was closed: begin() another")
        return self._drafts
