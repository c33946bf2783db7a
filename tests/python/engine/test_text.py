"""Incremental detokenisation and stop strings against whole-text references."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models

from specrs.engine.request import decoding
from specrs.engine.request.decoding import Detokenizer, TokenDecoder
from specrs.engine.request.text import OutputText, StopMatcher
from specrs.engine.request.token_bytes import TokenTable

MARK = "\u2581"
WORDS = [
    f"{MARK}a", f"{MARK}be", "c", MARK, MARK * 2, f"d{MARK}", "\u2603", f"{MARK}.", ".", "##x", "n't", " ' ", "x</w>",
    "</w>z</w>", "y", "\u65e5\u672c", "|", "  ", " do not", "\ufffd", "<0x+5>", "<0xe9>", "",
]  # fmt: skip
BYTES = [f"<0x{b:02X}>" for b in range(256)]
# Letters of the byte-level alphabet.
LETTERS = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144))]
IDS = {token: i for i, token in enumerate(dict.fromkeys(["<unk>", "<s>", "</s>", *WORDS, *BYTES, *LETTERS]))}
NOBODY = 10**6  # a row of a model that the tokenizer lacks

sequence, replace, fallback, fuse = decoders.Sequence, decoders.Replace, decoders.ByteFallback, decoders.Fuse
strip = decoders.Strip
DECODERS: dict[str, Callable[[], Any]] = {
    "byte level": decoders.ByteLevel,
    "byte level, strip": lambda: sequence([decoders.ByteLevel(), strip(" ", 1, 0)]),
    "llama": lambda: sequence([replace(MARK, " "), fallback(), fuse(), strip(" ", 1, 0)]),
    "nested": lambda: sequence([sequence([replace(MARK, " "), fallback()]), sequence([fuse(), strip(" ", 1, 0)])]),
    "gemma": lambda: sequence([replace(MARK, " "), fallback(), fuse()]),
    "strip of three": lambda: sequence([replace(MARK, " "), fallback(), fuse(), strip(" ", 3, 0)]),
    "strip of each": lambda: sequence([replace(MARK, " "), strip(" ", 1, 0), fallback()]),
    "metaspace": decoders.Metaspace,
    "metaspace, never": lambda: decoders.Metaspace(prepend_scheme="never"),
    "bytes, metaspace": lambda: sequence([fallback(), decoders.Metaspace()]),
    "word piece": decoders.WordPiece,
    "word piece as it is": lambda: decoders.WordPiece(cleanup=False),
    "bytes, word piece": lambda: sequence([fallback(), decoders.WordPiece()]),
    "bpe": decoders.BPEDecoder,
    "ctc": lambda: sequence([decoders.CTC(pad_token="y"), decoders.Metaspace()]),
    "bytes alone": fallback,
    "a character of the whole": lambda: sequence([fallback(), fuse(), replace(MARK, " ")]),
    "a string of the whole": lambda: sequence([fallback(), fuse(), replace("ab", " ")]),
    "a pattern": lambda: sequence([replace(Regex(f"{MARK}+"), " "), fuse()]),
    "a pattern of the whole": lambda: sequence([fuse(), replace(Regex(f"{MARK}+"), " ")]),
    "none": lambda: None,
}  # fmt: skip
AT_ONCE = ("a string of the whole", "a pattern of the whole")  # tokenizers whose text comes at the end


def tokenizer_with(decoder: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=IDS, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("<tool \xe9>"), AddedToken("\xc3\xa9"), AddedToken(" sp ", normalized=False)])
    tokenizer.decoder = decoder
    return tokenizer


def byte_tokens(text: str) -> list[int]:
    return [IDS[f"<0x{b:02X}>"] for b in text.encode()]


def stream(rng: random.Random, tokenizer: Tokenizer, least: int = 1) -> list[int]:
    """Random tokens, heavy on bytes that are no text."""
    added = [*tokenizer.get_added_tokens_decoder(), NOBODY]
    ids: list[int] = []
    for _ in range(rng.randrange(least, 20)):
        ids += rng.choice([
            [IDS[f"<0x{rng.choice([rng.randrange(256), 0x80, 0xE6, 0x97, 0xA5, 0xFF]):02X}>"]],
            byte_tokens(rng.choice("\u65e5\xe9\n\U0001f680\ufffda ")),
            [rng.choice(added)],
            [IDS[rng.choice(WORDS)]],
            [IDS[rng.choice(LETTERS)]],
            [IDS[rng.choice(LETTERS)]],
        ])  # fmt: skip
    return ids


@pytest.mark.parametrize("name", DECODERS)
def test_the_pieces_are_the_text_of_all_tokens(name: str) -> None:
    rng = random.Random(name)
    tokenizer = tokenizer_with(DECODERS[name]())
    decoder = TokenDecoder(tokenizer)
    for _ in range(300):
        ids, skip = stream(rng, tokenizer), rng.random() < 0.7
        text = Detokenizer(decoder, (), skip)
        want, so_far = tokenizer.decode(ids, skip_special_tokens=skip), ""
        for token in ids:
            so_far += text.push(token)
            assert want.startswith(so_far), ids
        assert so_far + text.finish() == want, ids


@pytest.mark.parametrize("name", [name for name in DECODERS if name not in AT_ONCE])
def test_behind_a_prompt_the_pieces_are_what_the_whole_text_adds(name: str) -> None:
    """The prompt ends with a word here: neither within a character nor within a run of bytes."""
    rng = random.Random(name)
    tokenizer = tokenizer_with(DECODERS[name]())
    decoder = TokenDecoder(tokenizer)
    for _ in range(200):
        prompt = [*stream(rng, tokenizer, 0), IDS[rng.choice(WORDS[:9])]]
        ids, skip = stream(rng, tokenizer), rng.random() < 0.7
        text = Detokenizer(decoder, prompt, skip)
        added = "".join([text.push(token) for token in ids]) + text.finish()
        whole = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
        assert tokenizer.decode(prompt, skip_special_tokens=skip) + added == whole, (prompt, ids)


@pytest.mark.parametrize("name", ["byte level", "gemma", "bytes alone"])
def test_bytes_of_a_prompt_take_nothing_from_an_output(name: str) -> None:
    """With any end of the prompt, the text is that of the output's own tokens."""
    rng = random.Random(name)
    tokenizer = tokenizer_with(DECODERS[name]())
    decoder = TokenDecoder(tokenizer)
    for _ in range(300):
        ids = stream(rng, tokenizer)
        text = Detokenizer(decoder, stream(rng, tokenizer))
        assert "".join([text.push(token) for token in ids]) + text.finish() == tokenizer.decode(ids), ids


def test_characters_come_whole_and_as_soon_as_they_are() -> None:
    level, fallback = (TokenDecoder(tokenizer_with(DECODERS[name]())) for name in ("byte level", "llama"))
    text = Detokenizer(level)
    assert [text.push(IDS[c]) for c in "a\xc3\xa9b"] == ["a", "", "\xe9", "b"]
    assert [text.push(IDS[c]) for c in "\xc3\xc3b"] == ["", "\ufffd", "\ufffdb"]
    assert (text.push(IDS["\xc3"]), text.finish()) == ("", "\ufffd")
    # One byte more would make U+FFFD of a whole run: its characters wait for the first token that is no byte.
    text = Detokenizer(fallback)
    assert [text.push(i) for i in (IDS["c"], *byte_tokens("\n\xe9"), IDS["c"])] == ["c", "", "", "", "\n\xe9c"]
    assert [text.push(i) for i in (*byte_tokens("\n"), IDS["<0x80>"], IDS["<0x61>"])] == ["", "\ufffd" * 2, "\ufffd"]


@pytest.mark.parametrize(
    "name", ["byte level", "llama", "gemma", "metaspace", "metaspace, never", "word piece as it is", "bytes, metaspace"]
)
def test_the_bytes_of_tokens_are_the_text_too(name: str) -> None:
    """This holds for added tokens as well; but for the space that a decoder drops at the beginning, and for bytes that
    are none."""
    rng = random.Random(name)
    tokenizer = tokenizer_with(DECODERS[name]())
    table = TokenTable(tokenizer)
    whole = 0
    for _ in range(600):
        ids = [IDS["c"], *stream(rng, tokenizer)]
        data = b"".join(map(table, ids)).removeprefix(b" ")
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        whole += 1
        assert tokenizer.decode(ids, skip_special_tokens=False) == text, ids
    assert whole > 60


def test_some_special_tokens_keep_their_text() -> None:
    decoder = TokenDecoder(tokenizer_with(decoders.ByteLevel()))
    start, end = IDS["<s>"], IDS["</s>"]
    text = Detokenizer(decoder, [end], keep=[start])
    assert [text.push(i) for i in (start, IDS["c"], end, IDS["\xc3"], IDS["\xa9"], start)] == [
        "<s>", "c", "", "", "\xe9", "<s>"
    ]  # fmt: skip


@pytest.mark.parametrize("name", DECODERS)
def test_a_token_costs_the_same_however_many_came_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps see each token once, and what is held is not gone through again."""
    parts = [0]

    def counted(steps: Any, some: Any) -> str:
        some = list(some)
        parts[0] += sum(map(len, some))
        return through(steps, some)

    through = decoding._through
    monkeypatch.setattr(decoding, "_through", counted)
    decoder = TokenDecoder(tokenizer_with(DECODERS[name]()))
    for run in (byte_tokens("\u65e5"), byte_tokens("ab"), [IDS["<0x80>"]], [IDS["\xc3"]], [IDS[""]], [IDS["<s>"]]):
        work = []
        for count in (300, 600):
            parts[0] = 0
            text = OutputText(Detokenizer(decoder), ["xx", "bb", "a\ufffd"], False)
            for i in range(count):
                assert text.push(run[i % len(run)])[1] is None
            work.append(parts[0])
        assert work[1] <= 2 * work[0] + 20, run


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


def completed(tokenizer: Tokenizer, ids: list[int], stops: list[str], skip: bool) -> bool:
    """Return whether the text of these tokens has a stop string of whole characters."""
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    return any(s in text for s in stops if "\ufffd" not in s)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_stop_strings_are_found_wherever_the_text_has_them(name: str, include: bool) -> None:
    rng = random.Random(name)
    tokenizer = tokenizer_with(DECODERS[name]())
    decoder = TokenDecoder(tokenizer)
    found = 0
    for _ in range(300):
        ids, skip = stream(rng, tokenizer), rng.random() < 0.7
        whole = tokenizer.decode(ids, skip_special_tokens=skip) or "a"
        places = [rng.randrange(len(whole)) for _ in range(rng.randrange(1, 4))]
        stops = [whole[at : at + rng.randrange(1, 4)] for at in places]
        text, out, hit, used = OutputText(Detokenizer(decoder, (), skip), stops, include), "", None, 0
        while hit is None and used < len(ids):
            released, hit = text.push(ids[used])
            out += released
            used += 1
        if hit is None:
            released, hit = text.finish()
            out += released
        assert (out, hit) == reference(tokenizer.decode(ids[:used], skip_special_tokens=skip), stops, include), ids
        found += hit is not None
        if name not in (*AT_ONCE, "bpe", "bytes, word piece"):  # the others tell later what a token adds
            assert not any(completed(tokenizer, ids[:n], stops, skip) for n in range(1, used)), (ids, stops)
    assert found > 200


def test_a_stop_string_of_bytes_ends_a_text_at_its_last_byte() -> None:
    """Bytes that follow might make U+FFFD of it: none follow."""
    decoder = TokenDecoder(tokenizer_with(DECODERS["llama"]()))
    for stop, include, want in (("\n", False, "c"), ("c\n\n", False, ""), ("\u65e5", True, "c\n\n\u65e5")):
        text, out, hit = OutputText(Detokenizer(decoder), [stop, "zz"], include), "", None
        tokens = [IDS["c"], *byte_tokens("\n\n\u65e5")]
        while hit is None:
            released, hit = text.push(tokens.pop(0))
            out += released
        assert (out, hit, len(tokens)) == (want, stop, {"\n": 4, "c\n\n": 3, "\u65e5": 0}[stop])
    # A stop string that came before anything might stop ends nothing later.
    text = OutputText(Detokenizer(decoder), ["\n"], False)
    assert text.push(IDS["c"], False) == ("c", None)
    assert text.push(IDS["<0x0A>"], False) == ("", None)
    assert text.push(IDS["c"]) == ("\nc", None)
    assert text.push(IDS["<0x0A>"]) == ("", "\n")


def test_a_stop_string_may_be_completed_by_what_was_held_back() -> None:
    text = OutputText(Detokenizer(TokenDecoder(tokenizer_with(decoders.ByteLevel()))), ["c\ufffd"], False)
    assert [text.push(IDS[c]) for c in ("b", "c", "\xc3")] == [("b", None), ("", None), ("", None)]
    assert text.finish() == ("", "c\ufffd")
    text = OutputText(Detokenizer(TokenDecoder(tokenizer_with(decoders.ByteLevel()))), ["c\ufffd"], False)
    assert [text.push(IDS[c]) for c in ("c", "\xc3")] == [("", None), ("", None)]
    assert text.finish(may_stop=False) == ("c\ufffd", None)
