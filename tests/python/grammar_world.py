"""Schemas of any shape, requests under them, and what their outputs must be; on the host and on a GPU."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from specrs import LLM, SamplingParams, StructuredOutputs
from specrs.engine import RequestOutput

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0, "top_p": 0.95},
    "penalised": {
        "temperature": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2, "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    },
}  # fmt: skip


def schema_of(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose values are short, so that most outputs come to their end."""
    leaves = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"]
    kind = rng.choice(leaves if depth == 0 else [*leaves, "object", "object", "array", "array", "anyOf", "ref"])
    if kind == "string":
        low = rng.randrange(3)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(4)}
    if kind == "integer":
        low = rng.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 2000)}
    if kind == "number":
        low = rng.randrange(-5, 5)
        return {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.randrange(1, 9), "multipleOf": 0.25}
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", "blue", 7, None, True, "gré\u00e9n", [1, "a"], {"k": []}], 3)}
    if kind == "const":
        return {"const": rng.choice(["fixed", 12, {"a": [1, None]}])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice([r"^[a-f]{2,4}$", r"^(x|yy)-\d{2}$", r"^\S{1,3}$"])}
    if kind == "format":
        return {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])}
    if kind == "object":
        names = rng.sample(["a", "bc", "name", "x y", '"q"', "élan"], rng.randrange(1, 4))
        properties = {name: schema_of(rng, depth - 1) for name in names}
        required = [n for n in names if rng.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        return {"type": "array", "items": schema_of(rng, depth - 1), "minItems": rng.randrange(2),
                "maxItems": rng.randrange(1, 4)}  # fmt: skip
    if kind == "anyOf":
        return {"anyOf": [schema_of(rng, depth - 1), schema_of(rng, 0)]}
    return {"$ref": "#/$defs/part", "$defs": {"part": schema_of(rng, depth - 1)}} if depth == 2 else schema_of(rng, 0)


def wanted_of(rng: random.Random) -> StructuredOutputs:
    """A form of any kind."""
    kind = rng.choice(["json"] * 6 + ["regex", "choice", "grammar", "after"])
    if kind == "json":
        whitespace = rng.choice([None, "", " {0,2}"])
        return StructuredOutputs(json=schema_of(rng), whitespace=whitespace)
    if kind == "regex":
        return StructuredOutputs(regex=rng.choice([r"\d{3}-[a-z]+", r"(?:ab|cd){1,5}e?", r"[A-Z][a-z ]{2,9}\."]))
    if kind == "choice":
        return StructuredOutputs(choice=["yes", "no", "no, never", 'maybe: "so"\n'])
    if kind == "grammar":
        return StructuredOutputs(grammar=SUMS)
    return StructuredOutputs(choice=["yes", "no"], start_after=rng.choice(["e", "a", "0"]))


SUMS = 'start: term ("+" term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]{1,3}/\n'


def fits(wanted: StructuredOutputs, text: str) -> bool:
    """Return whether a whole text has the form that was asked for, by other means than the core."""
    import re

    if wanted.start_after is not None:
        assert isinstance(wanted.start_after, str)
        text = text.split(wanted.start_after, 1)[1]
    if wanted.kind == "json":
        import jsonschema

        schema = json.loads(wanted.schema())
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        return True
    if wanted.regex is not None:
        return re.fullmatch(wanted.regex, text) is not None
    if wanted.choice is not None:
        return text in wanted.choice
    assert wanted.grammar == SUMS
    return re.fullmatch(r"[0-9+()]+", text) is not None and isinstance(eval(re.sub(r"\b0+(\d)", r"\1", text)), int)


def asked(seed: int, count: int, **common: Any) -> list[SamplingParams]:
    """Requests under grammars, some with bans of their own, and some without a grammar."""
    rng = random.Random(seed)
    params = []
    for i in range(count):
        free = i % 7 == 6
        params.append(
            SamplingParams(
                max_tokens=rng.choice([30, 60, 90]), seed=1000 * seed + i,
                structured_outputs=None if free else wanted_of(rng), min_tokens=rng.choice([0, 0, 2]),
                logprobs=rng.choice([None, None, 2]), **common,
            )
        )  # fmt: skip
    return params


def seen(output: RequestOutput) -> Any:
    """Return what must not depend on how tokens were found."""
    why = None if output.error is None else (type(output.error), str(output.error).split(": ", 1)[1])
    return (output.token_ids, output.text, output.finish_reason, output.stop_reason, why, output.logprobs)


def plainly(llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[Any]:
    """Run the requests one by one, by an engine that does not draft."""
    return [seen(llm.generate([p], [s], on_error="return")[0]) for p, s in zip(prompts, params, strict=True)]
