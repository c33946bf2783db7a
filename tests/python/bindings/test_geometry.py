"""Geometry through the bindings: a case worked by hand, and trees."""

from __future__ import annotations

import numpy as np
import pytest

from specrs import _specrs as core


def test_worked_case() -> None:
    g = core.Geometry(8, 2048, 4, core.TreeShape(3, 6, 16), "holey")
    region = g.draft_region(7)
    assert (region.layout, region.remainder, region.base, region.pages_per_branch) == ("holey", 3, 4, 3)
    assert [region.pos(b, 0) for b in range(3)] == [7, 19, 31]
    assert region.end == 40
    assert [region.hole(b) for b in range(3)] == [None, (4, 16, 3), (4, 28, 3)]
    with pytest.raises(core.ConfigError, match="branch = 3"):
        region.pos(3, 0)
    with pytest.raises(core.ConfigError, match="committed length = 2049"):
        g.draft_region(2049)


def test_sizes() -> None:
    g = core.Geometry(max_batch=2, max_context_len=100, page_size=16, shape=core.TreeShape(4, 4, 16))
    assert g.layout == "dense"
    assert g.shape == core.TreeShape(4, 4, 16)
    assert (g.max_batch, g.max_context_len, g.page_size) == (2, 100, 16)
    assert (g.alloc_len_per_decode, g.reserve_per_decode) == (16, 32)
    assert g.row_width % 16 == 0
    assert g.row_width >= 100 + 32 + 15
    assert g.row_pages == g.row_width // 16
    assert g.pages_for_full_load == 2 * g.row_pages
    assert g.alloc_target(5, 0) == 48
    assert g.alloc_target(5, 64) == 64
    assert (g.draft_mask_words, g.verify_mask_words) == (1, 1)
    assert g.per_branch_kv_indices == 2 * 4 * 104
    with pytest.raises(core.ConfigError, match="layout"):
        core.Geometry(1, 16, 1, core.TreeShape(1, 1, 1), "sparse")


def test_shapes_are_values() -> None:
    a, b = core.TreeShape(4, 3, 8), core.TreeShape(topk=4, steps=3, draft_tokens=8)
    assert a == b
    assert hash(a) == hash(b)
    assert a != core.TreeShape(4, 3, 9)
    assert (a.candidates, a.draft_slots) == (4 + 2 * 16, 12)
    assert repr(a) == "TreeShape(topk=4, steps=3, draft_tokens=8)"
    assert a.clamp_depth(0) is None
    assert a.clamp_depth(1) == core.TreeShape(4, 1, 5)
    assert a.clamp_depth(9) == a
    with pytest.raises(AttributeError):
        a.topk = 5  # type: ignore[misc]


def test_tree_links_and_masks() -> None:
    rng = np.random.default_rng(0)
    for n in [1, 2, 3, 64, 65, 200]:
        parents = [-1] + [int(rng.integers(0, i)) for i in range(1, n)]
        tree = core.Tree.from_parents(parents)
        assert tree.parents == parents
        assert len(tree) == n
        masks = tree.mask_bits()
        for i, p in enumerate(parents):
            assert tree.depths[i] == (0 if p < 0 else tree.depths[p] + 1)
            assert masks[i] == (1 << i) | (0 if p < 0 else masks[p])
            children, c = [], tree.next_child[i]
            while c >= 0:
                children.append(c)
                c = tree.next_sibling[c]
            assert children == [j for j, q in enumerate(parents) if q == i]


@pytest.mark.parametrize("parents", [[], [0], [-1, 1], [-1, -1], [-1, 0, 3], [-1] + [0] * 1024])
def test_bad_trees(parents: list[int]) -> None:
    with pytest.raises(core.ConfigError):
        core.Tree.from_parents(parents)


def test_certify() -> None:
    proof = core.certify(4, 512, 16, core.TreeShape(4, 3, 16))
    assert proof["holds"] is True
    assert (proof["failed"], proof["failures"]) == (0, [])
    assert proof["residues"] == 16
    assert proof["placements"] > 16 * 4 * 3
    assert [x["layout"] for x in proof["layouts"]] == ["dense", "holey"]
    for layout in proof["layouts"]:
        g = core.Geometry(4, 512, 16, core.TreeShape(4, 3, 16), layout["layout"])
        assert layout["row_width"] == g.row_width
        assert layout["reserve_per_decode"] == g.reserve_per_decode
    assert proof["native_bytes"] == sum(b["bytes"] for b in proof["buffers"])
    assert proof["per_branch"]["elements"] == 3 * 4 * 4 * 515  # elements of all steps
    assert proof["per_branch_fits"] is True
    with pytest.raises(core.ConfigError, match="page_size"):
        core.certify(4, 512, 12, core.TreeShape(4, 3, 16))
    with pytest.raises(core.ConfigError, match="max_batch"):
        core.certify(2**70, 512, 16, core.TreeShape(4, 3, 16))
