"""A source of drafts of your own, and one tree from it and the package's sources: outputs stay the same whatever it
proposes.

python examples/own_drafter.py
"""

from __future__ import annotations

from collections.abc import Sequence

from specrs._specrs import DraftCalibration, MergedDrafts, merge_drafts
from specrs.drafters import Drafter, Drafting, DraftRequest, Proposal, SuffixDrafter

VOCAB = 256  # bytes
TEXT = b"".join(b"row %d: %d squared is %d\n" % (n, n, n * n) for n in range(30))


class TableDrafter:
    """Knows how the rows of a table go on, and what a square is, which the text alone does not tell."""

    name: str = "table"
    depth: int = 32

    def begin(self, request: DraftRequest) -> TableDrafting:
        return TableDrafting(bytes(request.prompt))


class TableDrafting:
    """One request's text; the protocol of `specrs.drafters.Drafting`."""

    def __init__(self, text: bytes) -> None:
        self.text = text

    def extend(self, tokens: Sequence[int]) -> None:
        self.text += bytes(tokens)

    def propose(self, nodes: int, depth: int) -> Proposal:
        n, begun = self.text.count(b"\n"), self.text.rpartition(b"\n")[2]
        rows = b"".join(b"row %d: %d squared is %d\n" % (i, i, i * i) for i in (n, n + 1))
        if not rows.startswith(begun):
            return Proposal()
        chain = rows[len(begun) :][: min(nodes, depth)]
        return Proposal(list(range(-1, len(chain) - 1)), list(chain), [0.9] * len(chain))

    def bytes(self) -> int:
        return len(self.text)

    def close(self) -> None:
        self.text = b""


def follow(tree: MergedDrafts, text: bytes) -> list[int]:
    """The walk of verification: from the root, the child that carries the text's next token."""
    path, tokens, parents = [0], tree.tokens, tree.parents
    for token in text:
        child = next((n for n in range(len(tree)) if parents[n] == path[-1] and tokens[n] == token), None)
        if child is None:
            break
        path.append(child)
    return path


def rounds(drafters: Sequence[Drafter]) -> tuple[int, DraftCalibration]:
    """Replay the text as a target would write it: a tree, its walk and one token more in each round."""
    at, count, calibration = 20, 0, DraftCalibration(len(drafters))
    draftings: list[Drafting] = [d.begin(DraftRequest(count, list(TEXT[:at]), VOCAB)) for d in drafters]
    while at < len(TEXT):
        proposals = [d.propose(32, s.depth) for d, s in zip(draftings, drafters, strict=True)]
        tree = merge_drafts(TEXT[at - 1], VOCAB, proposals, 16, 32, calibration=calibration)
        path = follow(tree, TEXT[at : len(TEXT) - 1])
        tree.settle(path, calibration)
        for drafting in draftings:
            drafting.extend(list(TEXT[at : at + len(path)]))
        at, count = at + len(path), count + 1
    return count, calibration


if __name__ == "__main__":
    alone, _ = rounds([SuffixDrafter()])
    both, calibration = rounds([SuffixDrafter(), TableDrafter()])
    proposed, accepted = calibration.account(1)
    print(f"{len(TEXT) - 20} tokens: {alone} rounds with suffixes, {both} with the table too")
    print(f"table: {accepted} of {proposed} drafts accepted")
