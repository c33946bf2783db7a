"""Tool calls and reasoning in text: cases by hand, and random texts in random pieces against a whole-text reference."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator

import pytest

from specrs import ConfigError
from specrs.tools import (
    PARSERS,
    ArgumentsDelta,
    ContentDelta,
    Delta,
    ReasoningParser,
    ToolCallStart,
    merged,
    tool_parser,
)
from tools_reference import REFERENCES

TOOLS = ("f", "get_time", "g-2")


def deltas(dialect: str, pieces: list[str], **options: bool) -> list[Delta]:
    count = itertools.count()
    parser = tool_parser(dialect, TOOLS, lambda: f"id{next(count)}", **options)
    found = [delta for piece in pieces for delta in parser.feed(piece)]
    return merged(found + parser.finish() + parser.finish())


def message(found: list[Delta]) -> tuple[str, list[tuple[str, str]]]:
    content, calls = "", list[tuple[str, str]]()
    for delta in found:
        if isinstance(delta, ContentDelta):
            assert delta.text
            content += delta.text
        elif isinstance(delta, ToolCallStart):
            assert delta.index == len(calls) and delta.id == f"id{delta.index}"
            calls.append((delta.name, ""))
        else:
            assert isinstance(delta, ArgumentsDelta) and delta.index == len(calls) - 1 and delta.json_text
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.json_text)
    return content, calls


def chunked(text: str, rng: random.Random) -> list[str]:
    if rng.random() < 0.2:
        return list(text)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
    return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


# -- by hand ------------------------------------------------------------------------------------------------------

GOLDEN: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g-2", '
     '"arguments": {"x": [1, {"y": null}]}}\n</tool_call>\n', "Let me see.",
     [("f", "{}"), ("g-2", '{"x": [1, {"y": null}]}')]),
    ("hermes", 'a <tool_call>{"name":"f","arguments":{"s":"</tool_call> \\" }{ \\u00e9 é"}}</tool_call> b', "a b",
     [("f", '{"s":"</tool_call> \\" }{ \\u00e9 é"}')]),
    ("hermes", '<tool_call>{"arguments": {"a": "b"}, "name": "f"}</tool_call>', "", [("f", '{"a": "b"}')]),
    ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>', "oops}}</tool_call>",
     [("f", '{"a": ')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
     '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', []),
    ("hermes", '<tool_<tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_", [("f", "{}")]),
    ("hermes", "a < b and <tool_call> is a mark", "a < b and <tool_call> is a mark", []),
    ("hermes", ' \n ', " \n ", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"code": "a\nb\tc"}}</tool_call>', "",
     [("f", '{"code": "a\\nb\\tc"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call></tool_call>', "</tool_call>", [("f", "{}")]),
    ("llama3", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("llama3", '{"name": "f", "parameters": {}}; {"name": "get_time", "parameters": {"z": "utc"}};', "",
     [("f", "{}"), ("get_time", '{"z": "utc"}')]),
    ("llama3", '\n{"type": "function", "name": "f", "parameters": {}}\n{"name": "g-2", "arguments": {}}', "",
     [("f", "{}"), ("g-2", "{}")]),
    ("llama3", 'Here: {"name": "f", "parameters": {}}', 'Here: {"name": "f", "parameters": {}}', []),
    ("llama3", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3", 'I look.<|python_tag|>{"name": "f", "parameters": {}}; and so', "I look.; and so", [("f", "{}")]),
    ("llama3", '<|python_tag|>print(1)', "<|python_tag|>print(1)", []),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"arguments": {}, "name": "g-2"}]', "",
     [("f", '{"a": 1}'), ("g-2", "{}")]),
    ("mistral", 'So:[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "123456789"}]', "So:", [("f", "{}")]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]get_time[ARGS]{}', "",
     [("f", '{"a": "[TOOL_CALLS]"}'), ("get_time", "{}")]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123DEF[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]nobody[ARGS]{"a": 1}', '[TOOL_CALLS]nobody[ARGS]{"a": 1}', []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, ', "", [("f", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g', ', {"name": "g', [("f", "{}")]),
    ("mistral", "[[TOOL_CALLS] [1]", "[[TOOL_CALLS] [1]", []),
]  # fmt: skip


@pytest.mark.parametrize("dialect,text,content,calls", GOLDEN)
def test_by_hand(dialect: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    whole = deltas(dialect, [text])
    assert message(whole) == (content, calls)
    assert deltas(dialect, list(text)) == whole
    for i in range(len(text)):
        assert deltas(dialect, [text[:i], text[i:]]) == whole
    assert REFERENCES[dialect](text, TOOLS) == (content, calls)


def test_a_call_is_told_as_it_comes() -> None:
    parser = tool_parser("hermes", TOOLS, lambda: "x")
    assert parser.feed('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.feed('{"a') == [ToolCallStart(0, "x", "f"), ArgumentsDelta(0, '{"a')]
    assert parser.feed('": "long') == [ArgumentsDelta(0, '": "long')]
    assert parser.feed(" text\\") == [ArgumentsDelta(0, " text\\")]
    assert parser.feed('n"}') == [ArgumentsDelta(0, 'n"}')]
    assert parser.feed("}\n</tool_call>") == [] and parser.feed("bye ") == [ContentDelta("bye")]
    assert parser.finish() == [ContentDelta(" ")]
    with pytest.raises(ValueError, match="has ended"):
        parser.feed("x")


def test_calls_behind_the_first_are_dropped_where_one_is_wanted() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' * 3 + "end"
    for pieces in ([text], list(text)):
        assert message(deltas("hermes", pieces, parallel=False)) == ("end", [("f", '{"a": 1}')])


def test_what_a_grammar_vouches_for_is_no_content_where_it_is_cut() -> None:
    text = 'a\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g-2", "argum'
    for pieces in ([text], list(text)):
        assert message(deltas("hermes", pieces, certain=True)) == ("a", [("f", "{}")])
        content, calls = message(deltas("hermes", pieces))
        assert content.startswith("a\n<tool_call>") and len(calls) == 1


def test_ids_are_what_templates_take() -> None:
    made = {name: {PARSERS[name].new_id() for _ in range(1000)} for name in PARSERS}
    assert all(len(ids) == 1000 for ids in made.values())
    assert all(re.fullmatch("call_[0-9a-f]{24}", i) for i in made["hermes"] | made["llama3"])
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", i) for i in made["mistral"])
    with pytest.raises(ConfigError, match="nonsense"):
        tool_parser("nonsense", TOOLS)


def test_depth_is_bounded() -> None:
    def text(depth: int) -> str:
        return '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}</tool_call>"

    [_, arguments] = deltas("hermes", [text(127)])
    assert isinstance(arguments, ArgumentsDelta) and json.loads(arguments.json_text)
    content, calls = message(deltas("hermes", [text(100_000)]))
    assert len(calls) == 1 and calls[0][1].count("[") == 127 and content.count("[") == 100_000 - 127


# -- at random ----------------------------------------------------------------------------------------------------

MARKS = {
    "hermes": ["<tool_call>", "</tool_call>", "<tool_call>\n", "\n</tool_call>", "<tool_", "</"],
    "llama3": ["<|python_tag|>", ";", "; ", "<|", ";;"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][", "[ARGS]", "[CALL_ID]", "[TOOL_CALLS]f[ARGS]", "[TOOL", "], ", "]"],
}
NOISE = ["{", "}", "[", "]", '"', ",", ":", " ", "\n", "\\", "text ", "é", "1", "-", "2.5e3", "true", "nul", '"name"',
         '"arguments"', '"parameters"', '"name": "f"', '"name": "nobody"', "f", '"arguments": {', "null", "\\u12", "\t",
         "0", "😀", "NaN", "//"]  # fmt: skip


LETTERS = ["a", '\\"', "\\\\", "{", "}", "</tool_call>", "[TOOL_CALLS]", "é😀", "\\u00e9", "\n", "<tool_call>", ";",
           "<|python_tag|>", "]"]  # fmt: skip


def some_json(rng: random.Random, depth: int = 0) -> str:
    kind = rng.randrange(7 if depth < 3 else 5)
    space = rng.choice(["", " ", "\n "])
    if kind < 2:
        return '"' + "".join(rng.choice(LETTERS) for _ in range(rng.randrange(5))) + '"'
    if kind < 5:
        return rng.choice(["0", "-1", "2.50", "1e-3", "-0.0E+9", "true", "false", "null"])
    if kind == 5:
        return "[" + f"{space},{space}".join(some_json(rng, depth + 1) for _ in range(rng.randrange(3))) + "]"
    return some_object(rng, depth + 1)


def some_object(rng: random.Random, depth: int = 0) -> str:
    space = rng.choice(["", " ", "\n "])
    pairs = [f'"k{i}"{space}:{space}{some_json(rng, depth + 1)}' for i in range(rng.randrange(4))]
    return "{" + space + f",{space}".join(pairs) + space + "}"


def some_call(rng: random.Random, dialect: str) -> str:
    name = rng.choice([*TOOLS, *TOOLS, "nobody", "n\\u0061me"])
    space = rng.choice(["", " ", "\n"])
    key = rng.choice(["arguments", "parameters"])
    pairs = [f'"name":{space}"{name}"', f'"{key}":{space}{some_object(rng)}']
    if rng.random() < 0.2:
        other = rng.choice(["null", "1", "[]", '"{}"'])
        pairs[1] = f'"{key}": {other}'
    if rng.random() < 0.1:
        pairs.append(
            rng.choice(['"id": "x"', '"name": "f"', '"type": "function"', f'"{key}": {{}}', '"z": {"name": 1}'])
        )
    if rng.random() < 0.1:
        del pairs[rng.randrange(2)]
    if rng.random() < 0.4:
        rng.shuffle(pairs)
    body = "{" + space + f",{space}".join(pairs) + space + "}"
    if dialect == "hermes":
        return f"<tool_call>{space}{body}{space}</tool_call>"
    if dialect == "llama3":
        return rng.choice(["", "<|python_tag|>", ";", " ; "]) + body
    kind = rng.randrange(5)
    if kind == 0:
        head = rng.choice(["[ARGS]", "[CALL_ID]ab1[ARGS]", "[CALL_ID]ab1", " ", ""])
        return f"[TOOL_CALLS]{rng.choice([*TOOLS, 'nobody'])}{head}{space}{some_object(rng)}"
    if kind == 1:
        return f"[TOOL_CALLS]{space}{body}"
    other = some_call(rng, "llama3").lstrip("; ") if rng.random() < 0.5 else body
    return f"[TOOL_CALLS]{space}[{space}{body},{space}{other}{space}]" if kind < 4 else f"[TOOL_CALLS] [{body}]"


def some_text(rng: random.Random, dialect: str) -> str:
    parts = []
    for _ in range(rng.randrange(1, 5)):
        kind = rng.random()
        if kind < 0.5:
            part = some_call(rng, dialect)
            if rng.random() < 0.4:  # damaged
                at = rng.randrange(len(part) + 1)
                part = part[:at] + rng.choice(["", *NOISE, *MARKS[dialect]]) + part[at + rng.randrange(3) :]
        elif kind < 0.75:
            part = "".join(rng.choice(NOISE + MARKS[dialect] * 2) for _ in range(rng.randrange(12)))
        else:
            part = rng.choice(["Hello. ", "\n", " ", "Is a < b?", "[1]", ";", "", "\n\n"])
        parts.append(part)
    text = "".join(parts)
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.3 else text


def texts(dialect: str, count: int) -> Iterator[tuple[str, random.Random]]:
    for seed in range(count):
        rng = random.Random(f"{dialect} {seed}")
        yield some_text(rng, dialect), rng


@pytest.mark.parametrize("dialect", PARSERS)
def test_a_message_is_the_reference_s_in_any_pieces(dialect: str) -> None:
    calls = broken = 0
    for text, rng in texts(dialect, 1500):
        whole = deltas(dialect, [text])
        assert message(whole) == REFERENCES[dialect](text, TOOLS), text
        for _ in range(4):
            pieces = chunked(text, rng)
            assert deltas(dialect, pieces) == whole, pieces
        for delta in whole:
            if isinstance(delta, ArgumentsDelta):
                calls += 1
                try:
                    assert isinstance(json.loads(delta.json_text), dict)
                except ValueError:
                    broken += 1
    assert calls > 250 and 10 < broken < calls


@pytest.mark.parametrize("dialect", PARSERS)
def test_text_without_calls_stays_as_it_is(dialect: str) -> None:
    for text, rng in texts(dialect, 1000):
        parser = PARSERS[dialect](())
        found = [delta for piece in chunked(text, rng) for delta in parser.feed(piece)] + parser.finish()
        assert "".join(d.text for d in found if isinstance(d, ContentDelta)) == text


# -- reasoning ----------------------------------------------------------------------------------------------------


def split(text: str, inside: bool) -> tuple[str, str]:
    """Return what a parser of reasoning must say of the whole text."""
    start, end, space = "<think>", "</think>", " \t\n\r"
    if not inside:
        if not text.lstrip(space).startswith(start):
            return "", text
        text = text.lstrip(space)[len(start) :]
    thought, mark, said = text.partition(end)
    return (thought.strip(space), said.lstrip(space)) if mark else (thought.lstrip(space), "")


@pytest.mark.parametrize("inside", [False, True])
def test_reasoning_is_split_from_content_in_any_pieces(inside: bool) -> None:
    parts = ["<think>", "</think>", "<think>", "</think>", " ", "\n", "thought", "<", "</", "</thi", "é", "<th", "x"]
    both = 0
    for seed in range(4000):
        rng = random.Random(seed)
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(9)))
        parser = ReasoningParser("<think>", "</think>", inside=inside)
        found = [*map(parser.feed, chunked(text, rng)), parser.finish()]
        thought, said = ("".join(column) for column in zip(*found, strict=True))
        assert (thought, said) == split(text, inside), text
        both += bool(thought and said)
    assert both > 100
    with pytest.raises(ValueError, match="empty"):
        ReasoningParser("", "x")
