"""Lists of a block's levels that a device has made are those of the same logits."""

from __future__ import annotations

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core

LEVELS = [3, 0, 2, 5]
ROOTS = [1, 2, 3, 4]
IDS = torch.arange(40) * 2


def listed(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, their likeliest ids with log-probabilities, and a 1 for each row."""
    logits = torch.randn(sum(LEVELS), len(IDS), generator=torch.Generator().manual_seed(seed)) * 3
    log_probs, ids = logits.log_softmax(-1).topk(8)
    return logits, ids.int(), log_probs, torch.ones(len(logits), dtype=torch.int32)


def arrays(trees: core.TreeBatch) -> list[list[int]]:
    return [trees.sizes, from_dlpack(trees.tokens).tolist(), from_dlpack(trees.parents).tolist()]


@pytest.mark.parametrize("map_", [None, IDS], ids=["one vocabulary", "two"])
def test_trees_are_those_of_the_logits(map_: torch.Tensor | None) -> None:
    for seed in range(20):
        logits, *made = listed(seed)
        ours, theirs = core.DraftLists(logits, LEVELS, 8, map_), core.DraftLists.of(*made, LEVELS, map_)
        assert arrays(ours.trees(ROOTS, 20)) == arrays(theirs.trees(ROOTS, 20))
        assert ours.begin(ROOTS, 4) == theirs.begin(ROOTS, 4) == [0, 2, 3]


def test_a_row_without_a_distribution_costs_its_request_the_drafts() -> None:
    _, ids, log_probs, sound = listed(1)
    sound[4] = 0
    log_probs[4] = torch.nan
    lists = core.DraftLists.of(ids, log_probs, sound, LEVELS)
    assert [(error.request, error.row) for error in lists.faults] == [(2, 4)]
    assert lists.trees(ROOTS, 20).sizes == [20, 1, 1, 20]


def test_probabilities_may_round_up() -> None:
    log_probs = torch.tensor([[1e-7, -20.0]])
    lists = core.DraftLists.of(
        torch.tensor([[3, 5]], dtype=torch.int32), log_probs, torch.ones(1, dtype=torch.int32), [1]
    )
    assert from_dlpack(lists.trees([0], 3).tokens).tolist() == [0, 3, 5]


def test_lists_that_do_not_fit_are_refused() -> None:
    _, ids, log_probs, sound = listed(1)
    for bad in (-1, 40):
        wild = ids.clone()
        wild[0, 0] = bad
        with pytest.raises(core.ConfigError, match="listed token"):
            core.DraftLists.of(wild, log_probs, sound, LEVELS, IDS)
    for some in ((ids[:-1], log_probs, sound), (ids, log_probs[:, 1:], sound), (ids, log_probs, sound[1:])):
        with pytest.raises(core.ConfigError):
            core.DraftLists.of(*some, LEVELS)
    with pytest.raises(core.ConfigError):
        core.DraftLists.of(ids, log_probs.flip(1), sound, LEVELS).trees(ROOTS, 9)
