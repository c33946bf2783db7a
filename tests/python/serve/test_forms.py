"""Outputs in a form: what the API asks for reaches the grammar, and what it cannot have is refused by field."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from serve_world import Running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
USER = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("field,value", [
    ("response_format", {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}),
    ("guided_json", SCHEMA), ("guided_json", json.dumps(SCHEMA)), ("structured_outputs", {"json": SCHEMA}),
])  # fmt: skip
def test_a_schema_is_kept(web: Running, field: str, value: Any) -> None:
    options: dict[str, Any] = {"max_tokens": 200, "seed": 4, "temperature": 1.0, field: value}
    told = [web.complete(prompt="x = ", **options)["choices"][0]["text"],
            web.chat("x", **options)["choices"][0]["message"]["content"]]  # fmt: skip
    chunks = web.stream(COMPLETIONS, prompt="x = ", **options)
    told.append("".join(c["text"] for chunk in chunks for c in chunk["choices"]))
    for text in told:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert told[2] == told[0]


def test_other_forms(web: Running) -> None:
    def text(**options: Any) -> str:
        found: str = web.complete(prompt="x = ", max_tokens=60, seed=1, **options)["choices"][0]["text"]
        return found

    assert text(guided_choice=["yes", "no"]) in ("yes", "no")
    assert text(structured_outputs={"regex": "[ab]{3}"}).strip("ab") == ""
    assert text(guided_grammar='start: "a" "b"') == "ab"
    compact = {"json": SCHEMA, "disable_any_whitespace": True}
    assert " " not in text(structured_outputs=compact).replace('"name"', "").split('"age"')[1]
    found = web.chat("x", response_format={"type": "json_object"}, max_tokens=400, temperature=0.2, seed=2)
    [choice] = found["choices"]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    assert web.chat("x", response_format={"type": "text"}, max_tokens=2)["choices"]


@pytest.mark.parametrize("field,value", [
    ("response_format", "json"), ("response_format", {}), ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}), ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}),
    ("guided_json", 3), ("guided_json", "{"), ("guided_regex", "("), ("guided_regex", 3), ("guided_choice", []),
    ("guided_choice", "x"), ("guided_choice", [1]), ("guided_grammar", "start: nowhere"), ("guided_grammar", ""),
    ("structured_outputs", {}), ("structured_outputs", {"json": {}, "regex": "x"}),
    ("structured_outputs", {"nonsense": 1}), ("structured_outputs", {"regex": "x", "whitespace_pattern": " "}),
    ("structured_outputs", {"json": {}, "disable_fallback": True}), ("guided_regex", "x" * 300_000),
    ("guided_whitespace_pattern", " "),
])  # fmt: skip
def test_forms_that_are_none(web: Running, field: str, value: Any) -> None:
    for path, base in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
        error = web.refused(path, **base, **{field: value})
        assert error["param"] == field and error["message"].startswith(field), error


def test_one_field_says_the_form(web: Running) -> None:
    error = web.refused(COMPLETIONS, prompt="x", guided_json=SCHEMA, guided_regex="x")
    assert error["param"] == "guided_regex" and "guided_json" in error["message"]
