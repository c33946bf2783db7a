"""Compares a capsule's fields with each other: a round that contradicts itself is refused."""

from __future__ import annotations

from collections.abc import Sized

from specrs.capsule.errors import CapsuleError
from specrs.capsule.parts import DraftStep, Fields, Tree


def check(c: Fields) -> None:
    """Raise `CapsuleError` for the first contradiction."""
    _check_pool(c)
    _check_tables(c)
    _check_sharing(c)
    _check_drafts(c)
    _check_trees(c)
    _check_extend(c)


def _same(where: str, got: Sized, want: int, of: str) -> None:
    if len(got) != want:
        raise CapsuleError(where, f"{len(got)} entries, must have {want}: {of}")


def _check_pool(c: Fields) -> None:
    s, p = c.shape, c.pool
    for what, size in (("num_pages * page_size", p.num_pages * s.page_size),
                       ("row_pages * page_size", p.row_pages * s.page_size),
                       ("max_seqs * row_pages", p.max_seqs * p.row_pages)):  # fmt: skip
        if size > 2**31 - 1:
            raise CapsuleError("pool", f"{what} = {size}: does not fit int32 indexing")
    if not 1 <= len(c.rows) <= s.max_batch:
        raise CapsuleError("rows", f"{len(c.rows)} requests: must be 1..{s.max_batch}, shape.max_batch")
    if c.kind == "plain" and c.steps:
        raise CapsuleError("steps", f"{len(c.steps)} draft steps in a plain round")


def _check_tables(c: Fields) -> None:
    seen: dict[int, int] = {}
    for i, r in enumerate(c.rows):
        at = f"rows[{i}]"
        if r.row >= c.pool.max_seqs:
            raise CapsuleError(f"{at}.row", f"{r.row}: the pool has {c.pool.max_seqs} rows")
        if r.row in seen:
            raise CapsuleError(f"{at}.row", f"{r.row}: rows[{seen[r.row]}] has it too")
        seen[r.row] = i
        if r.generation == 0:
            raise CapsuleError(f"{at}.generation", "0: generations count from 1")
        if r.committed > c.shape.max_context_len:
            raise CapsuleError(f"{at}.committed", f"{r.committed}: max_context_len is {c.shape.max_context_len}")
        if r.reserved <= r.committed:
            raise CapsuleError(f"{at}.reserved", f"{r.reserved}: must exceed the {r.committed} committed positions")
        pages = -(-r.reserved // c.shape.page_size)
        if pages > c.pool.row_pages:
            raise CapsuleError(f"{at}.reserved", f"{r.reserved} need {pages} pages, a row has {c.pool.row_pages}")
        _same(f"{at}.pages", r.pages, pages, f"{r.reserved} positions of {c.shape.page_size} a page")
        columns: dict[int, int] = {}
        for col, page in enumerate(r.pages):
            if page >= c.pool.num_pages:
                raise CapsuleError(f"{at}.pages[{col}]", f"{page}: the pool has the pages 1..{c.pool.num_pages - 1}")
            if page in columns:
                raise CapsuleError(f"{at}.pages[{col}]", f"{page}: is in column {columns[page]} too")
            columns[page] = col


def _check_sharing(c: Fields) -> None:
    """Check that requests of the batch share only leading full pages, and that any other owner of a page owns a full
    committed one."""
    p = c.shape.page_size
    batch = {r.owner for r in c.rows}
    holders: dict[int, tuple[int, int]] = {}  # page -> (request, column)
    for i, r in enumerate(c.rows):
        for col, page in enumerate(r.pages):
            if page not in holders:
                holders[page] = (i, col)
                continue
            other, at = holders[page]
            q = c.rows[other]
            # By induction, the pages before a shared page are shared too.
            leading = at == col and r.pages[max(col - 1, 0)] == q.pages[max(col - 1, 0)]
            if not leading or (col + 1) * p > min(r.committed, q.committed):
                why = f"rows[{other}].pages[{at}] is it too; only equal beginnings of full committed pages are shared"
                raise CapsuleError(f"rows[{i}].pages[{col}]", f"{page}: {why}")
    last = 0
    raw = {page for page, owner in c.others if owner == "raw pages"}
    for n, (page, owner) in enumerate(c.others):
        at_page = f"others[{n}]"
        if not last <= page < c.pool.num_pages:
            raise CapsuleError(at_page, f"page {page}: must ascend within 1..{c.pool.num_pages - 1}")
        last = page
        if owner in batch:
            raise CapsuleError(at_page, f"{owner} is of the batch: its pages are in rows")
        if page in raw and owner != "raw pages":
            raise CapsuleError(at_page, f"page {page}: {owner} cannot own it beside raw callers")
        if page in holders:
            i, col = holders[page]
            if page in raw or (col + 1) * p > c.rows[i].committed:
                raise CapsuleError(at_page, f"page {page}: rows[{i}] writes it, {owner} cannot own it too")


def _check_drafts(c: Fields) -> None:
    s = c.shape
    if len(c.steps) > s.steps:
        raise CapsuleError("steps", f"{len(c.steps)} draft steps: shape.steps is {s.steps}")
    before: DraftStep | None = None
    for t, step in enumerate(c.steps):
        for name in ("tokens", "parents", "scores", "ancestors"):
            _same(f"steps[{t}].{name}", getattr(step, name), len(c.rows) * s.topk, "requests * topk")
        for z, (parent, bits) in enumerate(zip(step.parents, step.ancestors, strict=True)):
            i, b = divmod(z, s.topk)
            low, high = (i, i) if before is None else (i * s.topk, (i + 1) * s.topk - 1)
            if not low <= parent <= high:
                raise CapsuleError(f"steps[{t}].parents[{z}]", f"{parent}: of request {i} it must be in {low}..{high}")
            want = 1 << (b * s.steps + t) | (0 if before is None else before.ancestors[parent])
            if bits != want:
                odd = bits ^ want
                slot = (odd & -odd).bit_length() - 1
                why = f"draft slot {slot} is {bits >> slot & 1}: by the parents it must be {want >> slot & 1}"
                raise CapsuleError(f"steps[{t}].ancestors[{z}]", why)
        before = step


def _check_trees(c: Fields) -> None:
    for name, got in (("trees", c.trees), ("paths", c.paths), ("kept", c.kept)):
        _same(name, got, len(c.rows), "one a request")
    for i, (r, tree, path, kept) in enumerate(zip(c.rows, c.trees, c.paths, c.kept, strict=True)):
        _check_tree(c, i, tree)
        n = len(tree.parents)
        if r.committed + n > r.reserved:
            raise CapsuleError(f"trees[{i}]", f"{n} nodes behind {r.committed} tokens: {r.reserved} are reserved")
        at: int | None = -1
        for j, node in enumerate(path):
            if node >= n or tree.parents[node] != at:
                raise CapsuleError(f"paths[{i}][{j}]", f"node {node}: must be a child of node {at} of {n} nodes")
            at = node
        if not path:
            raise CapsuleError(f"paths[{i}]", "empty: the root is always accepted")
        if kept > len(path):
            raise CapsuleError(f"kept[{i}]", f"{kept}: the path has {len(path)} nodes")


def _check_tree(c: Fields, i: int, tree: Tree) -> None:
    n = len(tree.parents)
    limit = 1 if c.kind == "plain" else c.shape.draft_tokens
    if not 1 <= n <= limit:
        raise CapsuleError(f"trees[{i}].parents", f"{n} nodes: must be 1..{limit}")
    for name in ("tokens", "scores"):
        _same(f"trees[{i}].{name}", getattr(tree, name), n, "one a node")
    depths: list[int] = []
    for j, parent in enumerate(tree.parents):
        if (parent != -1) if j == 0 else not 0 <= parent < j:
            want = "-1, the root has none" if j == 0 else f"in 0..{j - 1}"
            raise CapsuleError(f"trees[{i}].parents[{j}]", f"{parent}: must be {want}")
        depths.append(0 if j == 0 else depths[parent] + 1)
        position = c.rows[i].committed + depths[j]
        if position >= c.shape.max_context_len:
            why = f"node {j} is at position {position}, max_context_len is {c.shape.max_context_len}"
            raise CapsuleError(f"trees[{i}].parents[{j}]", why)


def _check_extend(c: Fields) -> None:
    last = -1
    for n, e in enumerate(c.extend):
        if not last < e.request < len(c.rows):
            raise CapsuleError(f"extend[{n}]", f"request {e.request}: must ascend within 0..{len(c.rows) - 1}")
        last = e.request
        end, want = e.start + e.count, c.rows[e.request].committed + c.kept[e.request]
        if end != want or e.count < 1:
            why = f"positions {e.start}..{end}: must end at {want}, what the request has committed after the round"
            raise CapsuleError(f"extend[{n}]", why)
