"""Incremental detokenisation and stop strings against whole-text references."""

from __future__ import annotations

import random

import pytest

from specrs.engine.text import Detokenizer, KeepingDecoder, StopMatcher


class Utf8Decoder:
    """Token i is byte i; 256 is a special token."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語とemoji 🚀🏳️‍🌈", "", "é"])
def test_characters_come_whole_and_complete(text: str) -> None:
    d = Detokenizer(Utf8Decoder(), list(b"prompt "))
    pieces = [d.push(b) for b in text.encode()]
    assert "".join(pieces) + d.finish() == text
    assert all("\ufffd" not in p for p in pieces)


def test_an_unfinished_character_is_released_at_the_end() -> None:
    d = Detokenizer(Utf8Decoder(), [])
    data = "é".encode()[:1]
    assert [d.push(b) for b in b"a" + data] == ["a", ""]
    assert d.finish() == "\ufffd"


def test_bytes_that_never_become_a_character_do_not_hold_text_back_for_ever() -> None:
    d = Detokenizer(Utf8Decoder(), [])
    pieces = [d.push(0x80) for _ in range(40)]
    assert any(pieces)
    assert "".join(pieces) + d.finish() == bytes([0x80] * 40).decode(errors="replace")


def test_special_tokens_have_no_text() -> None:
    d = Detokenizer(Utf8Decoder(), [])
    assert [d.push(t) for t in (ord("a"), 256, ord("b"))] == ["a", "", "b"]


def test_some_special_tokens_keep_their_text() -> None:
    class Names(Utf8Decoder):
        """256 and 257 are special tokens, with names."""

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            names = {256: b"<A>", 257: b"<B>"}
            kept = (i for i in ids if i < 256 or not skip_special_tokens)
            return b"".join(names.get(i, bytes([i % 256])) for i in kept).decode("utf-8", errors="replace")

    keeping = KeepingDecoder(Names(), [256, 257], [256])
    d = Detokenizer(keeping, [257])
    assert [d.push(t) for t in (256, ord("a"), 257, 0xC3, 0xA9, 256)] == ["<A>", "a", "", "", "é", "<A>"]
    assert keeping.decode([256, 257], skip_special_tokens=False) == "<A><B>"


def test_a_space_after_a_special_token_stays() -> None:
    """Decoders of the sentencepiece kind drop the space that begins a text: no token may become the first of one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    words = ["\u2581one", "\u2581two", "<0xE2>", "<0x98>", "<0x83>"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{word: i + 3 for i, word in enumerate(words)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    strip = decoders.Strip(content=" ", left=1, right=0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    rng = random.Random(3)
    for _ in range(300):
        tokens = [t for _ in range(10) for t in rng.choice([[1], [2], [3], [4], [5, 6, 7]])]
        d = Detokenizer(tokenizer, [1, 3])
        text = "".join([d.push(t) for t in tokens]) + d.finish()
        assert text == tokenizer.decode([1, 3, *tokens]).removeprefix("one"), tokens


def reference(text: str, stops: list[str], include: bool, early: int = 0) -> tuple[str, str | None]:
    """Cut at the stop string that is completed first, behind so many characters."""
    for end in range(early + 1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            s = max(done, key=len)
            return text[: end if include else end - len(s)], s
    return text, None


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_equal_the_reference_for_any_split(include: bool) -> None:
    rng = random.Random(1)
    for _ in range(3000):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(12)))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(4))]
        matcher, out, hit, rest = StopMatcher(stops, include), "", None, text
        least, early = rng.choice([0, 0, 2, 5]), 0  # before `least` characters nothing stops
        while rest and hit is None:
            n = rng.randrange(1, 4)
            may_stop = len(text) - len(rest) >= least
            early += 0 if may_stop else len(rest[:n])
            released, hit = matcher.push(rest[:n], may_stop)
            rest = rest[n:]
            out += released
        if hit is None:
            out += matcher.finish()
        assert (out, hit) == reference(text, stops, include, early), (text, stops, early)


def test_text_that_cannot_begin_a_stop_string_is_not_held() -> None:
    matcher = StopMatcher(["</s>"], include=False)
    assert matcher.push("a<b</") == ("a<b", None)
    assert matcher.push("x") == ("</x", None)
    assert matcher.push("</s") == ("", None)
    assert matcher.push(">tail") == ("", "</s>")
