"""Random JSON schemas, values near them, and whether a value is what a schema takes, by others than the core."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import json
import random
import re
import uuid
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

import jsonschema
from jsonschema.validators import extend

from specrs._specrs import Grammar, GrammarFailedError, GrammarVocabulary

END = 256
"""The token that ends a text; the others are the bytes."""

EDGES = [
    0,
    1,
    -1,
    2,
    5,
    7,
    9,
    10,
    11,
    99,
    100,
    101,
    -10,
    -99,
    2**31,
    2**53 - 1,
    2**53,
    2**53 + 1,
    -(2**53) - 1,
    2**63 - 1,
    2**63,
    -(2**63),
    -(2**63) + 1,
    2**64,
    10**18,
    1234567890123456789,
]
PARTS = ["0.5", "1.5", "0.1", "0.25", "-0.75", "2.05", "99.99", "123456789.12345679", "0.000001"]
PATTERNS = [
    r"^[a-c]{1,3}$",
    r"^a",
    r"b$",
    r"ab|^c$",
    r'^[^"\\]*$',
    r'^[^<>:"/\\|?*]{1,4}$',
    r"^\d+$",
    r"^\w{1,3}$",
    r"^\S+$",
    r"\d",
    r"^(a|b\n)*$",
    r"^[^a]$",
    r"[\"\\]",
    r"(^|-)a($|-)",
    r"^\W+$",
    r"^.{2}$",
    r"^[\x00-\x1f]+$",
    r"^[ -~]*$",
]
FORMATS = ["date", "time", "date-time", "ipv4", "ipv6", "uuid"]
LETTERS = ["a", "b", "c", '"', "\\", "\n", "\x00", "\x1f", "\x7f", "/", " ", "é", "😀", "1", "-", "_", "\u2028", "٣"]
NAMES = ["a", "b", "ab", "c", 'q"', "n\n", "é"]
NAME_PATTERNS = ["^a", "b$", "^[ab]$", "^c$"]


def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary([bytes([i]) for i in range(256)] + [b""], [END])


def accepts(grammar: Grammar, text: str) -> bool:
    """Return whether a whole text is one of the grammar's."""
    try:
        grammar.start([END]).commit([*text.encode(), END])
    except GrammarFailedError:
        return False
    return True


def schema_of(rng: random.Random, depth: int = 2) -> Any:
    """A schema of any keywords that are enforced."""
    leaves = [_number, _number, _string, _string, _enum, _type]
    made = rng.choice(leaves if depth == 0 else [*leaves, _object, _object, _object, _array, _array, _joined, _joined])
    schema = made(rng, depth)
    if depth == 2 and isinstance(schema, dict) and rng.random() < 0.2:
        schema["$defs"] = {"part": schema_of(rng, 1)}
        schema = {**schema, "allOf": [*schema.get("allOf", []), {"$ref": "#/$defs/part"}]}
    return schema


def _type(rng: random.Random, depth: int) -> Any:
    return rng.choice(
        [True, {}, {"type": ["null", "boolean"]}, {"type": rng.choice(["string", "integer", "object", "array"])}]
    )


def _edge(rng: random.Random) -> int | Decimal:
    if rng.random() < 0.6:
        return rng.choice(EDGES) + rng.choice([0, 0, 1, -1])
    return Decimal(rng.choice(PARTS)) + rng.choice([0, 0, 1, -3])


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
    low = _edge(rng)
    if rng.random() < 0.7:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.7:
        high = (
            _edge(rng) if rng.random() < 0.4 else low + rng.choice([0, 1, 2, 10, 1000, Decimal("0.5"), Decimal("0.01")])
        )
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = high
    if rng.random() < 0.3:
        schema["multipleOf"] = rng.choice(
            [1, 2, 3, 5, 7, 10, 100, Decimal("0.5"), Decimal("0.25"), Decimal("0.01"), Decimal("2.5"), 15]
        )
    return schema


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.4:
        schema["minLength"] = rng.randrange(4)
    if rng.random() < 0.4:
        schema["maxLength"] = rng.randrange(6)
    if rng.random() < 0.5:
        schema["pattern"] = rng.choice(PATTERNS)
    elif rng.random() < 0.3:
        schema = {"type": "string", "format": rng.choice(FORMATS)}
    return schema


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    values = [_value(rng, 1) for _ in range(rng.randrange(1, 4))]
    return {"enum": values} if rng.random() < 0.6 else {"const": values[0]}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(4))
    schema: dict[str, Any] = {"type": "object", "properties": {n: schema_of(rng, depth - 1) for n in names}}
    schema["required"] = [n for n in names if rng.random() < 0.4] + (["z"] if rng.random() < 0.1 else [])
    if rng.random() < 0.7:
        schema["additionalProperties"] = rng.choice([False, False, False, True, schema_of(rng, 0)])
    if rng.random() < 0.3:
        schema["patternProperties"] = {p: schema_of(rng, 0) for p in rng.sample(NAME_PATTERNS, rng.randrange(1, 3))}
    if rng.random() < 0.3:
        schema["minProperties"] = rng.randrange(4)
    if rng.random() < 0.3:
        schema["maxProperties"] = rng.randrange(1, 4)
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    if rng.random() < 0.8:
        schema["items"] = rng.choice([schema_of(rng, depth - 1), schema_of(rng, 0), False])
    if rng.random() < 0.4:
        schema["prefixItems"] = [schema_of(rng, 0) for _ in range(rng.randrange(1, 3))]
    if rng.random() < 0.5:
        schema["minItems"] = rng.randrange(3)
    if rng.random() < 0.5:
        schema["maxItems"] = rng.randrange(4)
    return schema


def _joined(rng: random.Random, depth: int) -> dict[str, Any]:
    keyword = rng.choice(["anyOf", "allOf", "allOf", "oneOf"])
    if keyword == "allOf":  # schemas of one kind, so that something is left
        made = rng.choice([_number, _string, _object, _array])
        return {
            "allOf": [
                made(rng, depth - 1) if depth > 1 or made in (_number, _string) else made(rng, 1) for _ in range(2)
            ]
        }
    if keyword == "oneOf":
        return {"oneOf": [_number(rng, 0), _string(rng, 0), {"type": "null"}][: rng.randrange(1, 4)]}
    joined: dict[str, Any] = {"anyOf": [schema_of(rng, depth - 1) for _ in range(2)]}
    return {**joined, **_number(rng, 0)} if rng.random() < 0.2 else joined


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randrange(5)))


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(6 if depth == 0 else 8)
    if kind < 2:
        return _edge(rng)
    if kind < 4:
        return _text(rng)
    if kind < 6:
        return rng.choice([None, True, False])
    if kind == 6:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(3))]
    return {rng.choice(NAMES): _value(rng, depth - 1) for _ in range(rng.randrange(3))}


def value_of(rng: random.Random, schema: Any, root: Any, depth: int = 4) -> Any:
    """A value near a schema: often one that it takes."""
    if not isinstance(schema, Mapping) or not schema or depth == 0 or rng.random() < 0.04:
        return _value(rng, 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "$ref" in schema:
        return value_of(rng, root["$defs"]["part"], root, depth - 1)
    for keyword in ("allOf", "anyOf", "oneOf"):
        if keyword in schema and (rng.random() < 0.8 or "type" not in schema):
            if keyword == "allOf":
                kinds = [v for v in schema["allOf"] if isinstance(v, dict)]
                merged = {k: w for v in kinds for k, w in v.items()}
                return value_of(rng, rng.choice([merged, *kinds]) if kinds else True, root, depth - 1)
            return value_of(rng, rng.choice(schema[keyword]), root, depth - 1)
    kind = schema.get("type")
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    if kind in ("integer", "number"):
        return _number_near(rng, schema)
    if kind == "string":
        return _string_near(rng, schema)
    if kind == "object":
        found = {}
        for name, inner in schema.get("properties", {}).items():
            if name in schema.get("required", []) or rng.random() < 0.5:
                found[name] = value_of(rng, inner, root, depth - 1)
        more = schema.get("additionalProperties", True)
        if more is not False or "patternProperties" in schema:
            for _ in range(rng.randrange(3)):
                name = rng.choice([*NAMES, "zz", "cb"])
                inner = next((s for p, s in schema.get("patternProperties", {}).items() if re.search(p, name)), more)
                found.setdefault(name, value_of(rng, inner, root, depth - 1))
        return found
    if kind == "array":
        first = schema.get("prefixItems", [])
        count = schema.get("minItems", 0) + rng.randrange(3)
        return [
            value_of(rng, first[i] if i < len(first) else schema.get("items", True), root, depth - 1)
            for i in range(count)
        ]
    return _value(rng, 1)


def _number_near(rng: random.Random, schema: Mapping[str, Any]) -> int | Decimal:
    ends = [schema[k] for k in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum") if k in schema] or [0]
    step = Decimal(schema.get("multipleOf", 1))
    near = Decimal(rng.choice(ends)) + rng.choice(
        [0, 1, -1, 2, 7, Decimal("0.5"), Decimal("0.001"), Decimal("-0.01"), 100]
    )
    if rng.random() < 0.5:
        near = (near / step).to_integral_value() * step
    return (
        int(near) if near == near.to_integral_value() and (schema["type"] == "integer" or rng.random() < 0.7) else near
    )


def _string_near(rng: random.Random, schema: Mapping[str, Any]) -> str:
    if "format" in schema:
        texts = {
            "date": [
                "2024-02-29",
                "2021-02-29",
                "1900-02-29",
                "2000-02-29",
                "2021-12-31",
                "2021-04-31",
                "0000-01-01",
                "1-1-1",
            ],
            "time": ["23:59:59Z", "24:00:00Z", "12:30:00+05:30", "12:30:00", "12:00:60Z", "00:00:00.123-23:59"],
            "date-time": [
                "2024-02-29T23:59:59Z",
                "2023-02-29T23:59:59Z",
                "2021-01-01 00:00:00Z",
                "2021-01-01T00:00:00.5+01:00",
            ],
            "ipv4": ["1.2.3.4", "256.1.1.1", "01.1.1.1", "255.255.255.255", "1.2.3"],
            "ipv6": [
                "::",
                "::1",
                "1::",
                "1:2:3:4:5:6:7:8",
                "1:2:3:4:5:6:7::",
                "::1.2.3.4",
                "1::2::3",
                "1:2:3:4:5:6:1.2.3.4",
                "1:2:3:4:5:6:7:8:9",
                "12345::",
                "1:2:3:4:5::1.2.3.4",
            ],
            "uuid": [
                "123e4567-e89b-12d3-a456-426614174000",
                "123E4567-E89B-12D3-A456-42661417400",
                "123e4567e89b12d3a456426614174000",
            ],
        }
        return rng.choice(texts[schema["format"]])
    if "pattern" in schema and rng.random() < 0.7:
        known = {
            r"^[a-c]{1,3}$": "abc",
            r"^\d+$": "11",
            r"^.{2}$": "aé",
            r"^(a|b\n)*$": "ab\na",
            r"^[\x00-\x1f]+$": "\n\x1f",
        }
        return known.get(schema["pattern"], _text(rng))
    length = rng.randrange(schema.get("minLength", 0), max(schema.get("maxLength", 4), schema.get("minLength", 0)) + 1)
    return "".join(rng.choice(LETTERS) for _ in range(length))


def dumped(value: Any) -> str:
    """JSON's text of a value, its numbers exactly and without an exponent."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{dumped(k)}:{dumped(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(dumped, value)) + "]"
    if isinstance(value, Decimal):
        found = format(value, "f")
        found = found.rstrip("0").rstrip(".") if "." in found else found
        return "0" if found == "-0" else found
    return json.dumps(value, ensure_ascii=False)


def orders(value: Any) -> Iterator[Any]:
    """A value with the members of its objects in every order."""
    if isinstance(value, dict):
        for names in itertools.permutations(value):
            for members in itertools.product(*(list(orders(value[name])) for name in names)):
                yield dict(zip(names, members, strict=True))
    elif isinstance(value, list):
        for items in itertools.product(*(list(orders(item)) for item in value)):
            yield list(items)
    else:
        yield value


def changed(rng: random.Random, text: str) -> str:
    """A text with one character more, less or other."""
    at = rng.randrange(len(text) + 1)
    new = rng.choice(['"', "\\", ",", "0", "1", "-", ".", "a", "}", "\\u0061", "e1", "\n", "é"])
    return text[:at] + rng.choice([new, "", new]) + text[at + rng.randrange(2) :]


def _clock(text: str) -> bool:
    shape = r"(\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)"
    found = re.fullmatch(shape, text, re.ASCII)
    try:
        datetime.time.fromisoformat(found[1] + (found[3] if found[3] != "Z" else "+00:00") if found else "")
    except ValueError:
        return False
    return found is not None


def _day(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII) is not None


def _address(text: str, kind: type) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return text.isascii() and "%" not in text


def _uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False


STRICT = {
    "date": _day,
    "time": _clock,
    "date-time": lambda t: t[10:11] == "T" and _day(t[:10]) and _clock(t[11:]),
    "ipv4": lambda t: _address(t, ipaddress.IPv4Address),
    "ipv6": lambda t: _address(t, ipaddress.IPv6Address),
    "uuid": _uuid,
}


def _validator(flags: int) -> Any:
    def pattern(validator: Any, wanted: str, text: object, schema: Any) -> Iterator[Exception]:
        # Python's $ also stands before a last line break; ECMA's . stops at more ends of lines.
        ends = re.sub(r"(?<!\\)\$(?=$|\||\))", r"\\Z", wanted)
        if flags == re.ASCII:
            ends = ends.replace("^.{", "^[^\n\r\u2028\u2029]{")
        if isinstance(text, str) and not re.search(ends, text, flags):
            yield jsonschema.ValidationError(wanted)

    def format_(validator: Any, name: str, text: object, schema: Any) -> Iterator[Exception]:
        if isinstance(text, str) and not STRICT[name](text):
            yield jsonschema.ValidationError(name)

    def whole(checker: Any, value: Any) -> bool:
        return not isinstance(value, bool) and isinstance(value, (int, Decimal)) and value % 1 == 0

    base = jsonschema.Draft202012Validator
    return extend(
        base, {"pattern": pattern, "format": format_}, type_checker=base.TYPE_CHECKER.redefine("integer", whole)
    )


_VALIDATORS = [_validator(re.ASCII), _validator(0)]


def takes(schema: Any, value: Any) -> bool:
    """Return whether a schema takes a value, by either reading of its patterns."""
    return all(v(schema).is_valid(value) for v in _VALIDATORS)


def loaded(text: str) -> Any:
    """A value, its numbers exactly.

    Raises:
        ValueError: the text is no JSON.
        ArithmeticError: a number of it is beyond what Python counts with.
    """
    return json.loads(text, parse_float=Decimal)
