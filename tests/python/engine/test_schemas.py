"""Values that JSON schemas take: the core's grammars agree with other validators, or refuse by name; and no grammar of
a request harms the process or its neighbours."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

import schema_world as world
from specrs import LLM, SamplingParams, StructuredOutputs
from specrs._specrs import Grammar, GrammarFailedError, GrammarVocabulary
from specrs.engine import FinishReason
from specrs.grammar import GrammarError

BYTES = world.vocabulary()
LEADING = (*b'{}",:', world.END)  # to where members begin and end
AMBIGUOUS = 'start: e\ne: e e | e e e | "a" | '


def compiled(schema: Any, kind: str = "json") -> Grammar:
    return BYTES.compile(kind, [schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)], "")


def expect(schema: Any, taken: Sequence[str], refused: Sequence[str], kind: str = "json") -> None:
    grammar = compiled(schema, kind)
    found = {text: world.accepts(grammar, text) for text in (*taken, *refused)}
    assert found == {**dict.fromkeys(taken, True), **dict.fromkeys(refused, False)}, schema


NUMBERS: list[tuple[Any, list[str], list[str]]] = [
    ({"const": 1234567890123456789}, ["1234567890123456789"], ["1234567890123456768", "1234567890123456788"]),
    ({"enum": [1099511627776123457, 1]}, ["1099511627776123457", "1"], ["1099511627776123456"]),
    ({"const": 18446744073709551615}, ["18446744073709551615"], ["18446744073709551616", "18446744073709552000"]),
    ('{"const": 123456789.12345679}', ["123456789.12345679"], ["123456789.1234568"]),
    ('{"const": 0.1000000000000000000001}', ["0.1000000000000000000001"], ["0.1"]),
    ({"minimum": 2**53 + 1, "maximum": 2**53 + 1, "type": "integer"}, [str(2**53 + 1)], [str(2**53), str(2**53 + 2)]),
    ({"minimum": -(2**63), "type": "integer"}, [str(-(2**63)), "5", "-1"], [str(-(2**63) - 1)]),
    ({"exclusiveMinimum": 0, "maximum": 0.5, "type": "number"}, ["0.5", "0.1", "0.50"], ["0", "0.0", "0.51", "1"]),
    ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5, "type": "number"}, ["1.1", "1.49"], ["1", "1.0", "1.5"]),
    ({"exclusiveMinimum": 0, "maximum": 1, "type": "number"}, ["0.001", "1", "1.0"], ["0", "0.00", "1.01"]),
    ({"exclusiveMinimum": 5, "maximum": 6, "type": "integer"}, ["6"], ["5", "7"]),
    (
        {"allOf": [{"minimum": 10**18}, {"maximum": 10**18 + 1}], "type": "integer"},
        [str(10**18 + 1)],
        [str(10**18 + 2)],
    ),
    ({"type": "integer", "multipleOf": 7}, ["0", "14", "-21"], ["15", "7.0"]),
    ({"type": "number", "multipleOf": 0.01}, ["0.07", "1.1", "3"], ["0.071"]),
    ({"type": "number", "multipleOf": 0.3, "minimum": 0, "maximum": 3}, ["0.3", "0.9", "3"], ["1", "3.3"]),
    ({"type": "integer", "multipleOf": 2.5}, ["5", "-10"], ["2", "2.5"]),
]


@pytest.mark.parametrize(("schema", "taken", "refused"), NUMBERS)
def test_numbers_are_exact(schema: Any, taken: list[str], refused: list[str]) -> None:
    expect(schema, taken, refused)


STRINGS: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "string", "pattern": r'^[^<>:"/\\|?*]{1,20}$'}, ['"a"', r'"\n"'], [r'"a\\b"', r'"\""', '"a?"', '""']),
    ({"type": "string", "pattern": r"^[^a]+$"}, [r'"\\"', r'"\""', '"b"'], ['"a"', r'"\u0061"']),
    ({"type": "string", "pattern": r"(^|-)x($|-)"}, ['"x"', '"a-x"', '"x-a"'], ['"ax"', '"xa"']),
    ({"type": "string", "minLength": 1, "maxLength": 1}, ['"😀"', '"\x7f"', r'"\u001f"', r'"\t"'], ['""', '"ab"']),
    ({"enum": ["a\x7fb", "\n"]}, ['"a\x7fb"', r'"\n"', r'"\u000A"'], ['"ab"', '"\n"']),
    ({"type": "string"}, ['"\x7f"', r'"\u0000"'], ['"\n"', r'"\x"']),
]


@pytest.mark.parametrize(("schema", "taken", "refused"), STRINGS)
def test_strings_hold_what_their_pattern_says_and_nothing_else(
    schema: Any, taken: list[str], refused: list[str]
) -> None:
    expect(schema, taken, refused)


FORMATS: dict[str, tuple[list[str], list[str]]] = {
    "date": (
        ["2024-02-29", "2000-02-29", "2021-12-31"],
        ["2021-02-29", "1900-02-29", "2021-04-31", "0000-01-01", "21-1-1"],
    ),
    "time": (["23:59:59Z", "00:00:00.5+05:30"], ["24:00:00Z", "23:60:00Z", "12:00:00", "12:00:00+24:00"]),
    "date-time": (["2024-02-29T23:59:59Z"], ["2023-02-29T23:59:59Z", "2024-02-29 23:59:59Z", "2024-02-30T00:00:00Z"]),
    "duration": (["P1D", "PT1H2M3S", "P1Y2M3DT4H", "P4W"], ["P", "PT", "P1YT", "P1W2D", "1D", "P1H"]),
    "email": (["a.b+c@x-y.org"], [".a@b", "a..b@c", "a@-b", "a@b@c", "a" * 65 + "@b.c", "a@" + "b" * 64]),
    "hostname": (["a.b-c.d", "x" * 63], ["-a", "a-", "a..b", "x" * 64, ".".join(["x" * 60] * 5)]),
    "ipv4": (["0.0.0.0", "255.255.255.255"], ["256.0.0.1", "01.2.3.4", "1.2.3"]),
    "ipv6": (["::", "1::", "::1.2.3.4", "1:2:3:4:5:6:7:8"], ["1::2::3", "12345::", "1:2:3:4:5:6:7:8:9", ":1"]),
    "uuid": (["123e4567-E89B-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
    "uri": (["http://[::1]:80/a?b#c", "mailto:x@y"], ["//x", "a b:c", "http://a/%zz", "http://[::1"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_strict(name: str) -> None:
    taken, refused = ([json.dumps(text) for text in texts] for texts in FORMATS[name])
    expect({"type": "string", "format": name}, taken, refused)


OBJECTS: list[tuple[Any, list[str], list[str]]] = [
    (
        {
            "properties": {"score": {"type": "integer", "multipleOf": 5}},
            "required": ["score"],
            "type": "object",
            "additionalProperties": False,
            "patternProperties": {"^score$": {"type": "integer"}},
        },
        ['{"score":5}'],
        ['{"score":5,', '{"score":5,"score":5}', '{"score":6}'],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        ['{"a":1}', '{"a":1,"b":"x"}', '{"b":"x"}'],
        [r'{"\u0061":"x"}', r'{"a":1,"\u0061":"x"}', '{"a":1,"a":"x"}'],
    ),
    (
        {
            "type": "object",
            "properties": {n: {"type": "integer"} for n in "abc"},
            "minProperties": 2,
            "maxProperties": 2,
            "additionalProperties": False,
        },
        ['{"a":1,"b":2}', '{"b":1,"c":2}', '{"a":1,"c":2}'],
        ["{}", '{"a":1}', '{"a":1,"b":2,"c":3}', '{"a":1,"a":2}'],
    ),
    (
        {"type": "object", "minProperties": 1, "additionalProperties": {"type": "integer"}},
        ['{"x":1}', '{"x":1,"y":2}'],
        ["{}"],
    ),
    (
        {"type": "object", "properties": {"a": False, "b": True}, "additionalProperties": False},
        ["{}", '{"b":1}'],
        ['{"a":1}'],
    ),
    (
        {
            "type": "object",
            "patternProperties": {"^a": {"type": "integer"}, "b$": {"minimum": 5}},
            "additionalProperties": False,
        },
        ['{"a":1}', '{"ab":5}', '{"b":"x"}'],
        ['{"ab":4}', '{"ab":"x"}', '{"c":1}'],
    ),
]


@pytest.mark.parametrize("schema", [schema for schema, *_ in OBJECTS], ids=range(len(OBJECTS)))
def test_whatever_is_drawn_something_can_follow(schema: Any) -> None:
    """No comma is allowed that no member can stand behind: a request would end in an error there."""
    rng, grammar, ends = random.Random(1), compiled(schema), 0
    for _ in range(30):
        tracker, text = grammar.start([world.END]), b""
        while len(text) < 80 and (mask := tracker.mask()) is not None:
            allowed = mask.tokens()
            assert allowed, text
            token = rng.choice([t for t in allowed if t in LEADING] or allowed)
            tracker.commit([token])
            if token == world.END:
                ends += 1
                break
            text += bytes([token])
    assert ends > 5


@pytest.mark.parametrize(("schema", "taken", "refused"), OBJECTS)
def test_members_come_once_and_as_often_as_is_said(schema: Any, taken: list[str], refused: list[str]) -> None:
    expect(schema, taken, refused)


def test_choices_may_have_any_character() -> None:
    grammar = BYTES.compile("choice", ["a\x7fb", 'c"\n'])
    assert [world.accepts(grammar, t) for t in ("a\x7fb", 'c"\n', "ab")] == [True, True, False]


BY_NAME: list[tuple[Any, str]] = [
    (
        {"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}},
        "/minProperties = 2: .*twice",
    ),
    ({"properties": {"a": {"multipleOf": 0.3}}}, "/properties/a/multipleOf = 0.3: .*what works"),
    ({"multipleOf": 0}, "/multipleOf = 0: must not be 0"),
    ({"items": {"not": {"type": "null"}}}, "/items/not = .*not enforced"),
    ({"uniqueItems": True}, "/uniqueItems = true: .*not enforced"),
    ({"type": "string", "format": "iri"}, '/format = "iri": is not enforced; those that are: date'),
    ({"type": "string", "pattern": r"a\bc"}, "/pattern = .*beginning and its end alone"),
    ({"type": "string", "pattern": r"(?=a)b"}, r"/pattern = .*group that begins with"),
    ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "/oneOf = .*options 0 and 1 may both hold.*anyOf"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, r"/\$ref: leads to itself"),
    ({"$ref": "https://example.com/a.json"}, r"/\$ref = .*must lead to a place of this schema"),
    ({"type": "string", "minLength": 10**6}, "/minLength = 1000000: at most 100000"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "no value satisfies it"),
    ({"minimum": "3"}, '/minimum = "3": must be a number'),
    ({"x-guidance": {"lenient": True}}, "/x-guidance/lenient = true: is not supported"),
]


@pytest.mark.parametrize(("schema", "told"), BY_NAME)
def test_what_is_not_enforced_is_refused_by_its_place_and_value(schema: Any, told: str) -> None:
    with pytest.raises(GrammarError, match=told):
        compiled(schema)
    with pytest.raises(GrammarError, match=told):
        BYTES.compile("grammar", [f'start: "<" %json {json.dumps(schema)} ">"'])


def test_schemas_within_a_lark_grammar_go_the_same_way() -> None:
    inner = json.dumps({"const": 1234567890123456789})
    expect(
        f'start: "<" %json {inner} ">" // "a comment', ["<1234567890123456789>"], ["<1234567890123456768>"], "grammar"
    )
    with pytest.raises(GrammarError, match="stands in a text or a comment"):
        BYTES.compile("grammar", ['start: "%json {}"'])


HARMFUL: list[tuple[str, str]] = [
    ("json", '{"type":"integer","minimum":-9223372036854775808,"maximum":-9223372036854775807}'),
    ("json", '{"type":"integer","minimum":-18446744073709551615,"maximum":-18346744073709551615,"multipleOf":2}'),
    ("json", '{"allOf":[{"minimum":-9223372036854775808},{"maximum":-9223372036854775807}],"type":"integer"}'),
    (
        "json",
        '{"$ref":"#/$defs/a","$defs":{"a":{"exclusiveMinimum":-9.3e18,"exclusiveMaximum":-9.2e18,"type":"integer"}}}',
    ),
    ("json", '{"type":"number","minimum":-1e399,"maximum":1e399,"multipleOf":1e-17}'),
    ("json", '{"type":"array","minItems":1e400}'),
    ("json", '{"type":"string","maxLength":1e400,"pattern":"^(([ab]{0,1000}){0,1000}){0,1000}$"}'),
    ("grammar", 'start: %json {"type":"integer","minimum":-9223372036854775808,"maximum":-9223372036854775807}'),
    ("grammar", "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(60_000)) + '\na60000: "y"'),
    ("grammar", 'start: x{2000000000}\nx: y{0,2000000000}\ny: "a"'),
    ("regex", "(" * 120 + "a" + ")*" * 120),
    ("regex", "[ab][cd]" * 50_000),
]


def test_no_form_ends_the_process() -> None:
    """The schemas are compiled in a process of its own, so that one that ends it fails this test alone."""
    code = (
        "import json, sys\n"
        "from specrs._specrs import GrammarVocabulary, GrammarError, GrammarFailedError\n"
        "bytes_ = GrammarVocabulary([bytes([i]) for i in range(256)] + [b''], [256])\n"
        "for kind, text in json.load(sys.stdin):\n"
        "    try:\n"
        "        tracker = bytes_.compile(kind, [text]).start([256])\n"
        "        tracker.mask(); tracker.forced(); tracker.commit(list(b'a')); tracker.mask()\n"
        "    except (GrammarError, GrammarFailedError) as error:\n"
        "        assert len(str(error)) < 700\n"
        "    print('lived', flush=True)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], input=json.dumps(HARMFUL), capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.count("lived")) == (0, len(HARMFUL)), ran.stderr[-500:]


@pytest.mark.parametrize("ambiguous", [AMBIGUOUS, 'start: e\ne: e e | "a"', 'start: e\ne: e "a" e | e e | "a"'])
def test_an_ambiguous_grammar_has_so_much_work_and_no_more(ambiguous: str) -> None:
    """The grammar ends at the same place every time: items are counted, not seconds."""

    def followed() -> int:
        tracker = BYTES.compile("grammar", [ambiguous]).start([world.END])
        for n in range(600):
            try:
                tracker.mask()
                tracker.commit([ord("a")])
            except GrammarFailedError as error:
                assert "unambiguous grammar" in error.why
                with pytest.raises(GrammarFailedError, match="unambiguous grammar"):
                    tracker.mask()
                return n
        return 600

    assert 50 < followed() == followed() < 500


@pytest.mark.parametrize(
    ("grammar", "begins", "unit", "times"),
    [
        ('start: l\nl: "a" | l "," "a"', "a", ",a", 1500),
        ('start: e\ne: t ("+" t)*\nt: f ("*" f)*\nf: "a" | "(" e ")"', "", "(a+", 120),
        ('start: %json {"type":"array","items":{"enum":["x",1]}}', '["x"', ',"x"', 500),
    ],
)
def test_unambiguous_grammars_go_on(grammar: str, begins: str, unit: str, times: int) -> None:
    tracker = BYTES.compile("grammar", [grammar]).start([world.END])
    tracker.commit(list(begins.encode()))
    for _ in range(times):
        tracker.mask()
        tracker.commit(list(unit.encode()))


def test_an_ambiguous_grammar_ends_alone() -> None:
    common: dict[str, Any] = {"temperature": 0.0, "max_tokens": 230, "ignore_eos": True}
    form = StructuredOutputs(grammar=AMBIGUOUS)
    with LLM(device="cpu", max_context_len=512, max_batch=2, speculative=False) as llm:
        plain = SamplingParams(**common)
        hostile = SamplingParams(**common, min_tokens=229, structured_outputs=form)
        [alone] = llm.generate(["def f(x):\n"], plain)
        beside, ended = llm.generate(["def f(x):\n", "write words "], [plain, hostile], on_error="return")
        llm.audit()
    assert beside.token_ids == alone.token_ids and beside.finish_reason is FinishReason.LENGTH
    assert ended.finish_reason is FinishReason.ERROR and isinstance(ended.error, GrammarFailedError)
    assert "unambiguous grammar" in ended.error.why and 0 < len(ended.token_ids) < 230


def differ(seeds: range, per: int) -> dict[str, int]:
    """Schemas and texts of these seeds, by the core and by others; how many there were."""
    told = dict.fromkeys(("schemas", "refused", "nothing", "texts", "taken"), 0)
    for seed in seeds:
        rng = random.Random(seed)
        schema = world.schema_of(rng)
        values = [world.value_of(rng, schema, schema) for _ in range(per)]
        told["schemas"] += 1
        try:
            grammar = compiled(world.dumped(schema))
        except GrammarError as error:
            assert "= " in error.why or "no value satisfies" in error.why, (seed, str(error))
            nothing = "no value satisfies" in error.why
            told["nothing" if nothing else "refused"] += 1
            assert not nothing or not any(world.takes(schema, world.loaded(world.dumped(v))) for v in values), seed
            continue
        for value in values:
            texts = [world.dumped(v) for v in itertools.islice(world.orders(value), 60)]
            found = [world.accepts(grammar, text) for text in texts]
            fine = world.takes(schema, world.loaded(texts[0]))
            assert fine or not any(found), (seed, world.dumped(schema), texts[0])
            assert not fine or any(found) or len(texts) == 60, (seed, world.dumped(schema), texts[0])
            other = world.changed(rng, texts[0])
            with contextlib.suppress(ArithmeticError):  # an exponent that Python does not count with
                if world.accepts(grammar, other):
                    assert world.takes(schema, world.loaded(other)), (seed, world.dumped(schema), other)
            told["texts"] += len(texts) + 1
            told["taken"] += any(found)
    return told


def test_schemas_take_what_other_validators_take() -> None:
    told = differ(range(150), 12)
    assert told["refused"] < 0.12 * told["schemas"] and told["nothing"] < 0.4 * told["schemas"], told
    assert told["taken"] > 400, told


@pytest.mark.long
def test_schemas_take_what_other_validators_take_in_a_hundred_thousand_texts() -> None:
    told = differ(range(1_000, 3_000), 40)
    assert told["refused"] < 0.12 * told["schemas"] and told["nothing"] < 0.4 * told["schemas"], told
    assert told["texts"] > 100_000 and told["taken"] > 20_000, told


def test_a_vocabulary_of_bytes_is_what_these_tests_take_it_for() -> None:
    assert len(BYTES) == 257 and isinstance(BYTES, GrammarVocabulary)
