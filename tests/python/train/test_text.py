"""Text to train on: documents and their split, rows, the draft vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from specrs import ConfigError
from specrs.train.documents import Document, Documents, in_turns, read_text
from specrs.train.rows import Stream, pack
from specrs.train.trainer import Texts, frequent_tokens


def test_a_document_is_on_one_side_whatever_stands_beside_it() -> None:
    many = [Document.of("a", f"text {i}") for i in range(400)]
    split = Documents.of([*many, *many])
    assert len(split) == 400 and 5 <= len(split.held_out) <= 45
    backwards = Documents.of(many[::-1])
    assert {d.digest for d in split.held_out} == {d.digest for d in backwards.held_out}
    assert split.digest == backwards.digest != Documents.of(many[1:]).digest
    two = Documents.of([many[0], Document.of("b", "one"), Document.of("b", "two"), Document.of("c", "alone")])
    assert [d.kind for d in two.held_out].count("b") == 1 and "c" not in {d.kind for d in two.held_out}


def test_prompts_of_all_kinds_are_answered_first() -> None:
    found = [Document.of(kind, i) for kind, count in (("a", 3), ("b", 1), ("c", 2)) for i in range(count)]
    turns = [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("c", 1), ("a", 2)]
    assert [(d.kind, d.content) for d in in_turns(found)] == turns and [*in_turns([])] == []


def test_kinds_are_folders_fields_and_names(tmp_path: Path) -> None:
    for name, text in {"x/one.txt": "1", "x/deep/two.txt": "2", "three.txt": "3"}.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    (tmp_path / "root" / "picture.png").write_bytes(b"\xff\xfe\x00")
    lines = ['"a text"', json.dumps({"text": "another", "kind": "said"}), ""]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    (tmp_path / "long.md").write_text("line of text\n" * 4000)
    names = [str(tmp_path / name) for name in ("root", "lines.jsonl", "long.md")]
    found = read_text(names)
    every = [*found.kept, *found.held_out]
    assert found.left_out == 1
    kinds = {kind: sum(d.kind == kind for d in every) for kind in {d.kind for d in every}}
    assert kinds.pop("long") == 2  # sections alike count once; the last one is shorter
    assert kinds == {"x": 2, "root": 1, "lines": 1, "said": 1}


@pytest.mark.parametrize(
    ("content", "error"),
    [(b"{", "line 1: not JSON"), (b"3", "must be a text, or an object with 'text'"), (b"\xff", "not UTF-8"),
     (b"", "no documents"), (None, "no such file or directory")],
)  # fmt: skip
def test_errors_name_the_path(content: bytes | None, error: str, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"some\.jsonl.*" + error):
        read_text([str(path)])


def test_rows_have_the_text_and_pieces_end_with_documents() -> None:
    docs = [np.arange(n) + 1000 * n for n in (7, 20, 1, 33, 5)]
    rows = pack(docs, 8, None)
    assert torch.equal(rows.tokens.flatten(), torch.from_numpy(np.concatenate(docs)[: len(rows) * 8]))
    mixed = pack(docs, 8, np.random.default_rng(1))
    assert len(mixed) in (7, 8) and not torch.equal(mixed.tokens[: len(rows)], rows.tokens[: len(mixed)])
    for some in (rows, mixed):
        for tokens, pieces in zip(some.tokens, some.pieces, strict=True):
            step, turn = tokens.diff() == 1, pieces.diff()
            assert torch.equal(step, turn == 0) and set(turn.tolist()) <= {0, 1}
        assert len(set(some.pieces[:, 0].tolist())) == len(some)  # pieces end with rows, too


def test_a_stream_goes_on_from_its_place_and_has_as_much_text_as_answers() -> None:
    answers = [np.full(11, 1, dtype=np.int32)] * 9
    text = [np.full(5, 2, dtype=np.int32)] * 40

    def stream() -> Stream:
        return Stream(answers, text, 16, 2, seed=3)

    one, taken = stream(), []
    for _ in range(15):
        taken.append(one.next())
    assert one.at[0] >= 2
    again = stream()
    for i in range(15):
        later = stream()
        later.at = again.at
        assert torch.equal(later.next().tokens, taken[i].tokens) and torch.equal(again.next().pieces, taken[i].pieces)
    share = sum(int((rows.tokens == 2).sum()) for rows in taken) / sum(rows.tokens.numel() for rows in taken)
    assert 0.4 < share < 0.6
    little = Stream([], [np.arange(3, dtype=np.int32)], 16, 4, seed=0)
    assert len(little.next()) == 4  # less text than a batch


def test_the_draft_vocabulary_is_that_of_the_answers() -> None:
    texts = Texts([np.array([5, 5, 5, 2, 2, 9])], [np.array([7, 7, 7, 7, 0])])
    ids, coverage, rare = frequent_tokens(texts, 12, 3)
    assert ids.tolist() == [2, 5, 7] and coverage == pytest.approx(5 / 6) and rare == 1
    ids, coverage, rare = frequent_tokens(Texts([], texts.text), 12, 1)
    assert ids.tolist() == [7] and coverage == pytest.approx(0.8) and rare == 1
