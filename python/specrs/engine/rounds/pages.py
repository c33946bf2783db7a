"""The pages of requests: leasing, sharing and releasing them, and counting how many a request needs.

Every pass takes pages by a lease before it writes anything. If the pass fails, the lease rolls back and every
request is as it was before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from hashlib import blake2b

from specrs import _specrs as core
from specrs.engine.config import EngineConfig
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Request


class Pages:
    """Leases, shares and releases the pages of one engine's pool.

    Args:
        geometry: has the number of positions that a round reserves.
        copy: makes the copies that a lease asks for, in every cache over the pool's pages (`Executor.copy`).
        drafts: True if a draft head writes KV of its own.
    """

    def __init__(
        self,
        pool: core.Pool,
        config: EngineConfig,
        geometry: core.Geometry,
        copy: Callable[[core.Moves], None],
        drafts: bool,
    ) -> None:
        self.pool, self._config, self._copy, self._drafts = pool, config, copy, drafts
        self._secret = os.urandom(16)  # a key, so that nobody can search for two salts with the same digest
        self.round_positions = geometry.alloc_len_per_decode if drafts else 1
        """Positions behind the committed ones that a round may write, per request.

        Drafts of other sources than the head are not counted: a round verifies them only if there are pages for them.
        """

    @property
    def most_tokens(self) -> int:
        """The most tokens that one request can have."""
        return min(self._config.max_context_len or 1, self._config.page_size * (self._config.num_pages or 1))

    def most_positions(self, request: Request) -> int:
        """The most positions that a request ever reserves if it runs alone, from its prompt to its last round.

        The KV of the last token is never written, so at most ``max_total - 2`` positions are committed before a round.
        If a request has one token left, the round does not draft. So at most ``max_total - 3`` positions are committed
        before a round that drafts.
        """
        most = request.ending.max_total
        drafts = most - request.prompt_len >= 3  # prefill draws a token, and the first round may draw two
        return max(most - 1, most - 3 + self.round_positions if drafts else 0)

    def has_room(self, admitted: Sequence[Request]) -> bool:
        """Return whether the pool has pages for the prompts of all admitted requests and one round of them all."""
        page, need = self._config.page_size, 0
        for r in admitted:
            positions = max(r.committed, r.prefill_target) + self.round_positions
            need += -(-positions // page) - self.pool.allocated(r.seq) // page  # pages of rounds in flight come back
        stats = self.pool.stats()
        return stats["free_pages"] + stats["evictable_pages"] >= need

    def admit(self, request: Request) -> None:
        """Give a request without a row one of the page table, sharing the pages of a cached prefix of its tokens."""
        if self._config.prefix_cache:
            later = request.unscored < request.prompt_len - 1  # the later rows' logits are wanted
            most = request.unscored if later else None
            # Compute at least the last position, because its logits, or its features for the head, are wanted.
            known = request.tokens[: request.prefill_target - 1]
            request.admit(*self.pool.cache_lookup(known, most, self._salt(request)))
        else:
            request.admit(self.pool.create(), 0, 0)

    def release(self, request: Request) -> None:
        """Take the request's pages back."""
        if request.row is not None:
            self.pool.release([request.row])
            request.row = None
        request.committed = 0

    def share_prefix(self, request: Request) -> None:
        """Offer the request's full computed pages to later requests, and note how far draft KV is sound in them."""
        if not self._config.prefix_cache or request.error is not None:
            return
        drafted = request.head.prefix if self._drafts else 0
        self.pool.cache_insert(request.seq, request.tokens[: request.committed], drafted, self._salt(request))

    def _salt(self, request: Request) -> int:
        """The core's salt of a request's cached pages; 0 without one."""
        salt = request.params.cache_salt
        if salt is None:
            return 0
        digest = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8, key=self._secret).digest()
        return int.from_bytes(digest, "little") or 1

    def lease(self, batch: Batch, extra: Sequence[int]) -> core.Lease:
        """Lease pages for ``extra`` positions behind the committed ones of each request, and copy shared pages."""
        ends = [n + more for n, more in zip(batch.lens, extra, strict=True)]
        lease = self.pool.reserve(list(zip(batch.seqs, ends, strict=True)))
        try:
            copies = lease.copies
            if len(copies):
                self._copy(copies)
        except BaseException:
            lease.rollback()  # the error's traceback would keep the lease alive
            raise
        return lease
