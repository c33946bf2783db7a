"""Token recycling: drafts from what the target ranked highest after each token that it has seen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from specrs._specrs import ConfigError, DraftProposal, RecycledTokens
from specrs.drafters.protocol import DraftRequest


class RecyclingDrafter:
    """A source of drafts from the target's last best tokens after each token (arXiv 2408.08696); it drafts where no
    text repeats.

    A request has a table of its own, unless the operator asks for shared ones. A shared table leaks what other requests
    were told, by timing: it serves requests of one ``cache_salt`` alone, and a request without a salt shares nothing.

    Args:
        limit: bytes of a table at most; a token that was seen takes about 50.
        depth: levels below the last token that it proposes at most.
        shared: true if requests of equal ``cache_salt`` share a table.
        tables: shared tables that are kept at most; the one whose last request began longest ago goes first.

    Raises:
        ConfigError: a limit that no table has, with the range; no shared table at all.
    """

    name = "recycling"

    def __init__(self, *, limit: int = 8 << 20, depth: int = 6, shared: bool = False, tables: int = 16) -> None:
        if tables < 1:
            raise ConfigError(f"tables = {tables}: a shared table has to be kept")
        RecycledTokens(1, limit)  # refuses a limit now, rather than each request's drafting
        self.limit, self.depth, self.shared, self.tables = limit, depth, shared, tables
        self._shared: OrderedDict[tuple[str, int], RecycledTokens] = OrderedDict()

    def begin(self, request: DraftRequest) -> RecyclingDrafting:
        """The request's table, and the end of its prompt."""
        table = self._table(request)
        return RecyclingDrafting(table, request.prompt, owned=not self._shares(request))

    def bytes(self) -> int:
        """Memory of the shared tables."""
        return sum(table.bytes for table in self._shared.values())

    def _shares(self, request: DraftRequest) -> bool:
        return self.shared and request.cache_salt is not None

    def _table(self, request: DraftRequest) -> RecycledTokens:
        if not self.shared or request.cache_salt is None:
            return RecycledTokens(request.vocab_size, self.limit)
        key = request.cache_salt, request.vocab_size
        table = self._shared.pop(key, None)
        if table is None:
            table = RecycledTokens(request.vocab_size, self.limit)
        self._shared[key] = table
        while len(self._shared) > self.tables:
            self._shared.popitem(last=False)
        return table


class RecyclingDrafting:
    """One request's table, its own or a shared one."""

    def __init__(self, table: RecycledTokens, prompt: Sequence[int], *, owned: bool = True) -> None:
        self._table: RecycledTokens | None = table
        self._owned = owned
        self._last = prompt[-1] if len(prompt) else None
        table.follow(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens that were committed: each is now the likeliest behind the token before it."""
        if len(tokens):
            before = [] if self._last is None else [self._last]
            self._live().follow([*before, *tokens])
            self._last = tokens[-1]

    def observe(self, tokens: Sequence[int], top: Sequence[Sequence[int]]) -> None:
        """Learn the target's likeliest next tokens, ``top``, after each of ``tokens``, which are nodes of a verified
        tree."""
        self._live().observe(tokens, top)

    def propose(self, nodes: int, depth: int) -> DraftProposal:
        """The best tokens behind the last one, and behind those."""
        table = self._live()
        return table.propose(self._last or 0, 0 if self._last is None else nodes, depth)

    def bytes(self) -> int:
        """Memory that it holds; a shared table is its drafter's."""
        return self._table.bytes if self._owned and self._table is not None else 0

    def close(self) -> None:
        """Let go of the table."""
        self._table = None

    def _live(self) -> RecycledTokens:
        if self._table is None:
            raise RuntimeError("this drafting was closed: begin() another")
        return self._table
