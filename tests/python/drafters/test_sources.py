"""The sources of the package through their protocol, and trees merged from them."""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specrs import ConfigError, TreeBatch
from specrs._specrs import DraftCalibration, DraftCorpus, SuffixDrafts, merge_drafts
from specrs.drafters import (
    CorpusDrafter,
    Drafter,
    Drafting,
    DraftRequest,
    Drafts,
    Observing,
    Proposal,
    RecyclingDrafter,
    SuffixDrafter,
)

FILE = list(range(100, 200))


def request(prompt: Sequence[int], **more: Any) -> DraftRequest:
    return DraftRequest(request_id=7, prompt=prompt, vocab_size=1000, **more)


def best_path(drafts: Drafts) -> list[int]:
    """Tokens of the likeliest path."""
    path, at = [], -1
    while children := [i for i, p in enumerate(drafts.parents) if p == at]:
        at = max(children, key=lambda i: drafts.probs[i])
        path.append(int(drafts.tokens[at]))
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "texts.corpus"
    CorpusDrafter.build(path, [FILE, [1, 2, 3]], 1000)
    return path


def sources(corpus: Path) -> list[Drafter]:
    return [SuffixDrafter(), RecyclingDrafter(), CorpusDrafter(corpus)]


def test_every_source_follows_the_protocol(corpus: Path) -> None:
    for source in sources(corpus):
        drafting: Drafting = source.begin(request([*FILE[:50], 5, 6, *FILE[10:14]]))
        drafting.extend(FILE[14:20])
        drafts = drafting.propose(16, source.depth)
        assert 0 < len(drafts) <= 16, source.name
        assert best_path(drafts)[0] == FILE[20]
        assert all(0 < p <= 1 for p in drafts.probs) and len(drafts.buckets or []) == len(drafts)
        assert len(drafting.propose(0, 4)) == len(drafting.propose(4, 0)) == 0
        assert drafting.bytes() >= 0
        with pytest.raises(ConfigError, match="token = 1000 is outside"):
            drafting.extend([1, 1000])
        drafting.close()
        drafting.close()
        assert drafting.bytes() == 0
        with pytest.raises(RuntimeError, match="closed"):
            drafting.propose(1, 1)
    assert len({s.name for s in sources(corpus)}) == 3


def test_an_empty_prompt_proposes_nothing(corpus: Path) -> None:
    for source in sources(corpus):
        assert len(source.begin(request([])).propose(8, 8)) == 0, source.name


def test_suffixes_go_deep_and_a_prediction_comes_first() -> None:
    drafting = SuffixDrafter().begin(request([*FILE, 7, 8, *FILE[20:40]]))
    assert best_path(drafting.propose(40, 32)) == FILE[40:72]
    assert drafting.matched == 20
    assert best_path(drafting.propose(4, 4, after=FILE[40:44])) == FILE[44:48]
    predicted = SuffixDrafter().begin(request([1, 2, 3], prediction=FILE))
    assert best_path(predicted.propose(8, 8)) == FILE[:8]


def test_suffixes_hold_their_limit() -> None:
    drafting = SuffixDrafter(limit=1 << 17).begin(request(FILE))
    for i in range(400):
        drafting.extend([(i * i + j * 7919) % 1000 for j in range(100)])
        assert drafting.bytes() <= 1 << 17


def test_recycling_learns_from_rows_that_were_verified() -> None:
    drafting = RecyclingDrafter().begin(request([5]))
    assert isinstance(drafting, Observing)
    assert len(drafting.propose(8, 4)) == 0
    drafting.observe([5, 9], [[9, 8], [4, 3, 2]])
    drafts = drafting.propose(8, 2)
    assert [int(t) for t in drafts.tokens][:2] == [9, 4] and set(drafts.tokens) == {9, 8, 4, 3, 2}


def test_recycled_tokens_are_shared_by_salt_where_the_operator_asks_alone() -> None:
    def learnt(source: RecyclingDrafter, first: str | None, second: str | None) -> bool:
        source.begin(request([5], cache_salt=first)).observe([5], [[9]])
        return len(source.begin(request([5], cache_salt=second)).propose(4, 4)) > 0

    assert learnt(RecyclingDrafter(shared=True), "a", "a")
    assert not learnt(RecyclingDrafter(shared=True), "a", "b")
    assert not learnt(RecyclingDrafter(shared=True), None, None)
    assert not learnt(RecyclingDrafter(), "a", "a")
    shared = RecyclingDrafter(shared=True, tables=2)
    for salt in "abc":
        shared.begin(request([5], cache_salt=salt)).observe([5], [[9]])
    assert len(shared.begin(request([5], cache_salt="c")).propose(4, 4)) > 0
    assert len(shared.begin(request([5], cache_salt="a")).propose(4, 4)) == 0, "the oldest table went"
    assert shared.bytes() > 0
    with pytest.raises(ConfigError, match="tables = 0"):
        RecyclingDrafter(tables=0)


def test_a_limit_that_nothing_fits_in_is_refused_before_a_request_comes() -> None:
    with pytest.raises(ConfigError, match=r"suffix bytes = 65535 is outside 65536\.\."):
        SuffixDrafter(limit=65535)
    with pytest.raises(ConfigError, match="recycling bytes = -1"):
        RecyclingDrafter(limit=-1)


def test_a_corpus_refuses_what_it_cannot_serve(corpus: Path, tmp_path: Path) -> None:
    drafter = CorpusDrafter(corpus)
    assert (len(drafter.corpus), drafter.corpus.documents, drafter.corpus.vocab) == (103, 2, 1000)
    with pytest.raises(ConfigError, match="vocab = 999"):
        drafter.begin(DraftRequest(1, [1], 999))
    damaged = bytearray(corpus.read_bytes())
    damaged[100] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    with pytest.raises(ConfigError, match="checksum"):
        CorpusDrafter(tmp_path / "damaged")
    CorpusDrafter(tmp_path / "damaged", verify=False)
    (tmp_path / "short").write_bytes(damaged[:-4])
    with pytest.raises(ConfigError, match="cut short"):
        CorpusDrafter(tmp_path / "short", verify=False)
    with pytest.raises(ConfigError, match="No such file"):
        CorpusDrafter(tmp_path / "none")
    assert not list(tmp_path.glob("*.partial"))
    for documents, why in (
        ([], "documents"), ([[1], []], r"documents\[1\] is empty"), ([[1, 1000]], "corpus token = 1000"),
        ([[1], [-1]], "corpus token = -1"), ([[1], [2**31]], r"documents\[1\]: "), ([[1], ["a"]], r"documents\[1\]: "),
        ([[1.5]], r"documents\[0\]: "), ([1], r"documents\[0\]: "),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            CorpusDrafter.build(tmp_path / "new", documents, 1000)
    assert not (tmp_path / "new").exists()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")  # a pipe stands for a device, which root could replace
    for path, why in (("folder", "no regular file"), ("pipe", "no regular file"), ("none/new", "No such file")):
        with pytest.raises(ConfigError, match=f"corpus file.*{why}"):
            CorpusDrafter.build(tmp_path / path, [[1]], 1000)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    for vocab in (-1, 0, 2**24 + 1):
        with pytest.raises(ConfigError, match=f"vocab = {vocab} is outside 1.."):
            CorpusDrafter.build(tmp_path / "new", [[0]], vocab)
    with pytest.raises(ConfigError, match="no file of at least 64 bytes"):
        CorpusDrafter(tmp_path / "folder")
    assert {p.name for p in tmp_path.iterdir()} == {"texts.corpus", "damaged", "short", "folder", "pipe"}
    assert not list((tmp_path / "folder").iterdir())


def test_corpora_that_are_built_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """If they have one path, the last one stands whole; if their names differ in their endings, each has its own."""
    whole = {name: [[i] * 3000 for _ in range(4)] for i, name in enumerate(("x.a", "x.b", "x"), 1)}

    def build(name: str) -> None:
        for _ in range(5):
            CorpusDrafter.build(tmp_path / name, whole[name], 1000)
            CorpusDrafter.build(tmp_path / "one", whole[name], 1000)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(build, [*whole] * 2))
    assert {p.name for p in tmp_path.iterdir()} == {*whole, "one"}
    for i, name in enumerate(whole, 1):
        drafting = CorpusDrafter(tmp_path / name).begin(request([i] * 8))
        assert drafting.matched == 8
    CorpusDrafter(tmp_path / "one")  # opening verifies the file


def test_a_corpus_of_a_generator_and_of_one_token(tmp_path: Path) -> None:
    CorpusDrafter.build(tmp_path / "c", (iter([7]) for _ in range(1)), 8)
    drafter = CorpusDrafter(tmp_path / "c", depth=3, name="mine")
    assert (len(drafter.corpus), drafter.corpus.documents) == (1, 1)
    drafting = drafter.begin(DraftRequest(0, [7, 7, 3], 8))
    assert len(drafting.propose(4, 4)) == 0
    again = pickle.loads(pickle.dumps(drafter))
    assert (again.name, again.depth, len(again.corpus)) == ("mine", 3, 1)


def test_building_over_an_open_corpus_leaves_who_has_it_alone(corpus: Path) -> None:
    drafting = CorpusDrafter(corpus).begin(request(FILE[:5]))
    CorpusDrafter.build(corpus, [[9] * 20], 1000)
    assert best_path(drafting.propose(8, 8)) == FILE[5:13]
    assert DraftCorpus(corpus).documents == 1


def test_sources_of_any_class_make_one_tree() -> None:
    core = SuffixDrafts(1000, 1 << 20)
    core.prompt([5, 6, 7, 1, 5, 6])
    mine = Proposal([-1, 0, -1], [7, 9, 8], [0.6, 0.5, 0.1])
    tree = merge_drafts(6, 1000, [core.propose(8, 8), mine], 16, 8)
    assert tree.tokens[:2] == [6, 7] and tree.sources[1] == 0b11
    assert 0b10 in tree.sources and tree.parents[0] == -1
    trees = TreeBatch.from_drafts([tree, merge_drafts(3, 1000, [], 16, 8)])
    assert trees.sizes == [len(tree), 1]
    again = TreeBatch.from_parents([tree.parents], [tree.tokens], [tree.scores])
    assert again.sizes == [len(tree)]
    assert len(tree.pruned(2, 8)) == 2
    calibration = DraftCalibration(2)
    for _ in range(200):
        tree.settle([0], calibration)
    assert calibration.account(1) == (400, 0)
    worse = merge_drafts(6, 1000, [core.propose(8, 8), mine], 16, 8, calibration=calibration)
    assert worse.scores[1] < tree.scores[1]


@pytest.mark.parametrize("value", [-2, 2**16, 2**31 - 1, 2**32, 2**63, 2**200, float("nan"), 1e30, None, "a"])
@pytest.mark.parametrize("name", ["parents", "tokens", "probs", "buckets"])
def test_what_a_source_may_not_say(name: str, value: Any) -> None:
    good: dict[str, Any] = {"parents": [-1, 0], "tokens": [5, 6], "probs": [0.9, 0.8], "buckets": [3, 0]}
    assert len(merge_drafts(1, 100, [SimpleNamespace(**good)], 8, 8)) == 3
    for changed in ([good[name][0], value], [value, good[name][1]], good[name][:1], [*good[name], good[name][0]]):
        with pytest.raises((ConfigError, TypeError)):
            merge_drafts(1, 100, [SimpleNamespace(**{**good, name: changed})], 8, 8)
