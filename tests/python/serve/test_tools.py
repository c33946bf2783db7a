"""Tool calls and reasoning over HTTP: what a grammar makes the small model write is a call, in every form, whole and in
a stream; what a request cannot have is refused by field."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from serve_fuzz import damaged, encode
from serve_world import Running, running
from specrs.engine import AsyncLLM
from specrs.serve.calling import Manner, Speaking
from specrs.serve.voices import message
from specrs.tools import Dialect, Thinking, detect, detect_reasoning
from tools_world import TEMPLATES, THINKING, marked_model

PATH = "/v1/chat/completions"
SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"},
                                     "unit": {"enum": ["c", "f"]}},
    "required": ["city", "days"], "additionalProperties": False,
}  # fmt: skip
WEATHER: dict[str, Any] = {"type": "function", "function": {
    "name": "get_weather", "description": "Tells the weather.", "parameters": SCHEMA}}  # fmt: skip
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
USER = [{"role": "user", "content": "Weather?"}]
BASE: dict[str, Any] = {"messages": USER, "max_tokens": 120, "tools": [WEATHER, NOW]}
SCHEMAS = {"get_weather": SCHEMA, "now": {"type": "object", "maxProperties": 0}}


@pytest.fixture(scope="module", params=TEMPLATES)
def spoken(request: Any, engine: AsyncLLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose template has a dialect."""
    yield from served(engine, tmp_path_factory.mktemp(request.param), TEMPLATES[request.param])


@pytest.fixture(scope="module")
def hermes(engine: AsyncLLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from served(engine, tmp_path_factory.mktemp("hermes"), TEMPLATES["hermes"])


@pytest.fixture(scope="module")
def thinking(engine: AsyncLLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from served(engine, tmp_path_factory.mktemp("thinking"), THINKING)


def served(engine: AsyncLLM, folder: Path, template: str) -> Iterator[Running]:
    path = folder / "dialect.jinja"
    path.write_text(template, encoding="utf-8")
    with running(engine, folder, chat_template=str(path), max_waiting=64, max_prompts=32) as made:
        yield made
        made.idle()


def told(web: Running, **body: Any) -> list[dict[str, Any]]:
    """The choices of a request, whole; and the same of a stream, but for the ids of calls."""
    body = {**BASE, **body}
    answer = web.post(PATH, **body, return_token_ids=True, logprobs=True)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["choices"]
    chunks = web.stream(PATH, **body, return_token_ids=True, logprobs=True, stream_options={"include_usage": True})
    assert chunks[-1]["usage"]["completion_tokens"] == answer.json()["usage"]["completion_tokens"]
    for want in found:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == want["index"]]
        assert mine[0]["delta"]["role"] == "assistant" and all("role" not in c["delta"] for c in mine[1:])
        streamed = message([{k: v for k, v in c["delta"].items() if k != "role"} for c in mine])
        assert without_ids(streamed) == without_ids({k: v for k, v in want["message"].items() if k != "refusal"})
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [want["finish_reason"]]
        assert [t for c in mine for t in c.get("token_ids", [])] == want["token_ids"]
        assert [t for c in mine if c["logprobs"] for t in c["logprobs"]["content"]] == want["logprobs"]["content"]
    return found


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{k: v for k, v in call.items() if k != "id"} for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls}


def checked(call: dict[str, Any], cut: bool = False) -> None:
    """A call that keeps its tool's schema."""
    assert set(call) == {"id", "type", "function"} and call["type"] == "function"
    assert re.fullmatch("call_[0-9a-f]{24}|[a-zA-Z0-9]{9}", call["id"])
    if not cut:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])


def test_a_required_call_comes_in_any_dialect(spoken: Running) -> None:
    ids, several = set(), 0
    for seed in range(2):
        for parallel in (True, False):
            body = {"tool_choice": "required", "seed": seed, "n": 2, "parallel_tool_calls": parallel}
            choices = told(spoken, **body)
            assert told(spoken, **body, speculative=False)[0]["token_ids"] == choices[0]["token_ids"]
            for choice in choices:
                calls = choice["message"]["tool_calls"]
                assert choice["message"]["content"] is None and calls
                cut = choice["finish_reason"] == "length"
                assert cut or choice["finish_reason"] == "tool_calls"
                for call in calls:
                    checked(call, cut and call is calls[-1])
                    ids.add(call["id"])
                several += len(calls)
                assert parallel or len(calls) == 1
    assert len(ids) == several >= 8


def test_a_named_call_ends_as_openai_s_does(spoken: Running) -> None:
    [choice] = told(spoken, tool_choice=NAMED, temperature=0)
    [call] = choice["message"]["tool_calls"]
    checked(call)
    assert call["function"]["name"] == "get_weather" and choice["finish_reason"] == "stop"
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    [choice] = told(spoken, tool_choice=allowed, temperature=0, parallel_tool_calls=False)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == call["function"]


def test_a_conversation_goes_on_with_calls_and_their_results(spoken: Running) -> None:
    [choice] = told(spoken, tool_choice=NAMED, temperature=0)
    call = choice["message"]["tool_calls"][0]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    messages = [*USER, choice["message"], result]
    found = spoken.post(PATH, messages=messages, tools=[WEATHER], max_tokens=4, return_token_ids=True)
    assert found.status_code == 200, found.text
    text = spoken.post("/detokenize", tokens=found.json()["prompt_token_ids"]).json()["prompt"]
    arguments = json.dumps(json.loads(call["function"]["arguments"]), ensure_ascii=False)
    assert arguments in text and "get_weather" in text and f"<tool {call['id']}>sunny" in text
    assert json.dumps(WEATHER) in text
    same = spoken.post("/tokenize", messages=messages, tools=[WEATHER]).json()["tokens"]
    assert same == found.json()["prompt_token_ids"]


def test_what_the_model_may_say_without_a_call_is_content(spoken: Running) -> None:
    free = {"temperature": 0.8, "seed": 3, "max_tokens": 40}
    [auto] = told(spoken, **free)
    [none] = told(spoken, **free, tool_choice="none")
    assert auto["message"] == none["message"] and auto["message"]["content"] and auto["finish_reason"] == "length"
    assert auto["token_ids"] == none["token_ids"]
    [strict] = told(spoken, **free, tools=[STRICT, NOW])
    assert strict["message"]["content"] and "tool_calls" not in strict["message"]


def test_a_form_beside_tools(hermes: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for seed in range(4):
        [choice] = told(hermes, seed=seed, response_format=form)
        if choice["finish_reason"] == "length":
            continue
        if choice["message"]["content"] is None:
            assert choice["finish_reason"] == "tool_calls"
            for call in choice["message"]["tool_calls"]:
                assert call["function"]["name"] in SCHEMAS
        else:
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    [choice] = told(hermes, seed=1, response_format=form, tool_choice="none")
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    [choice] = told(hermes, seed=1, response_format=form, tool_choice=NAMED)
    checked(choice["message"]["tool_calls"][0])
    error = hermes.refused(PATH, **BASE, guided_regex="a+")
    assert error["param"] == "guided_regex" and "JSON alone" in error["message"]


def test_stop_strings_end_calls(hermes: Running) -> None:
    [choice] = told(hermes, tool_choice=NAMED, temperature=0, stop=['"city"'])
    [call] = choice["message"]["tool_calls"]
    assert '"city"' not in call["function"]["arguments"] and call["function"]["arguments"].startswith("{")
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == '"city"'


@pytest.mark.parametrize("param,body", [
    ("tools", {"tools": 3}), ("tools", {"tools": {}}), ("tools", {"tools": [3]}), ("tools", {"tools": [{}]}),
    ("tools", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}),
    ("tools", {"tools": [{"type": "function"}]}), ("tools", {"tools": [{"type": "function", "function": {}}]}),
    *(("tools", {"tools": [{"type": "function", "function": {"name": name}}]})
      for name in ("", "a b", "x" * 65, "é", 3, None, "a\n", "f.g")),
    ("tools", {"tools": [WEATHER, WEATHER]}), ("tools", {"tools": [NOW] * 129}),
    *(("tools", {"tools": [{"type": "function", "function": {"name": "f", **more}}]})
      for more in ({"parameters": 3}, {"parameters": {"type": "string"}}, {"parameters": {"type": ["object"]}},
                   {"strict": "yes"}, {"description": 3}, {"description": "x" * 300_000})),
    ("tool_choice", {"tool_choice": "always"}), ("tool_choice", {"tool_choice": 3}),
    ("tool_choice", {"tool_choice": {}}),
    ("tool_choice", {"tool_choice": {"type": "function"}}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "nobody"}}}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": 3}}}),
    ("tool_choice", {"tool_choice": {"type": "allowed_tools"}}),
    ("tool_choice", {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}),
    ("tool_choice", {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": [NAMED]}}}),
    ("tool_choice", {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [3]}}}),
    ("tool_choice", {"tools": [], "tool_choice": "required"}), ("tool_choice", {"tools": None, "tool_choice": NAMED}),
    ("parallel_tool_calls", {"parallel_tool_calls": "no"}), ("include_reasoning", {"include_reasoning": 1}),
    ("functions", {"functions": [{"name": "f"}]}), ("function_call", {"function_call": {"name": "f"}}),
])  # fmt: skip
def test_tools_that_are_none(hermes: Running, param: str, body: dict[str, Any]) -> None:
    error = hermes.refused(PATH, **{**BASE, **body})
    assert error["param"] == param and error["message"].startswith(param), error


def test_no_nonsense_is_a_fault_of_the_server(hermes: Running) -> None:
    whole = {"type": "function", "function": {"name": "f", "description": "d", "strict": True, "parameters": {
        "type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}, "b": {"$ref": "#/$defs/c"}},
        "required": ["a"], "$defs": {"c": {"type": "array", "items": {"type": "integer"}}}}}}  # fmt: skip
    base = {"messages": USER, "max_tokens": 2, "tools": [whole, NOW], "parallel_tool_calls": False}
    answers = Counter[int]()
    for seed in range(250):
        rng = random.Random(seed)
        body = json.loads(json.dumps({**base, "tool_choice": rng.choice(["auto", "required", NAMED, "none"])}))
        body["tools"][0]["function"]["name"] = rng.choice(["f", "get_weather"])
        for _ in range(rng.randint(1, 2)):
            listed = body.get("tools")
            damaged(rng, listed if isinstance(listed, list) and rng.random() < 0.8 else body)
        answer = hermes.client.post(PATH, content=encode(body), headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400), (body, answer.text)
        answers[answer.status_code] += 1
    assert answers[200] > 20 and answers[400] > 50, answers


def test_schemas_that_cannot_be_kept(hermes: Running) -> None:
    def tool(schema: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "parameters": schema}}

    deep: Any = {"type": "object"}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep}}
    for schema in ({"type": "object", "properties": {"a": {"type": "nonsense"}}},
                   {"type": "object", "properties": {"a": {"$ref": "http://example.org/x"}}},
                   {"type": "object", "properties": {"a": {"pattern": "("}}}, {"type": "object", "properties": 3},
                   {"$ref": "#/nowhere"}):  # fmt: skip
        error = hermes.refused(PATH, **{**BASE, "tools": [tool(schema)], "tool_choice": "required"})
        assert error["param"] == "tools" and error["code"] == "invalid_grammar", error
        assert hermes.post(PATH, **{**BASE, "tools": [tool(schema)], "max_tokens": 2}).status_code == 200
    error = hermes.refused(PATH, **{**BASE, "tools": [tool(deep)]})
    assert error["param"] == "tools" and "levels" in error["message"]
    shouting = {"type": "object", "properties": {"description": {"type": "integer", "description": ":[" * 129}}}
    [choice] = told(hermes, tools=[tool(shouting)], tool_choice="required", parallel_tool_calls=False, seed=1)
    for text in (call["function"]["arguments"] for call in choice["message"].get("tool_calls", [])):
        assert choice["finish_reason"] == "length" or jsonschema.validate(json.loads(text), shouting) is None
    empty = [tool({}), tool({"properties": {}})]
    for one in empty:
        assert hermes.post(PATH, **{**BASE, "tools": [one], "tool_choice": "required"}).status_code == 200


def test_a_template_without_calls_has_none(web: Running) -> None:
    error = web.refused(PATH, **BASE)
    assert error["param"] == "tools" and "tool_call_parser" in error["message"]
    assert web.post(PATH, **{**BASE, "tool_choice": "none", "max_tokens": 2}).status_code == 200
    assert web.post(PATH, **{**BASE, "tools": [], "tool_choice": "auto", "max_tokens": 2}).status_code == 200


def test_an_operator_may_name_the_parsers(engine: AsyncLLM, tmp_path: Path) -> None:
    with running(engine, tmp_path, tool_call_parser="mistral", reasoning_parser="think") as web:
        [choice] = told(web, tool_choice=NAMED, temperature=0)
        assert re.fullmatch("[a-zA-Z0-9]{9}", choice["message"]["tool_calls"][0]["id"])


# -- reasoning ----------------------------------------------------------------------------------------------------


def test_reasoning_apart_from_content(thinking: Running) -> None:
    form = {"grammar": r'start: "<think>\n" /[a-z ]{3,9}/ "\n</think>\n\n" /[A-Z]{3}/'}
    body = {"tools": None, "structured_outputs": form, "seed": 5}
    [choice] = told(thinking, **body)
    assert re.fullmatch("[A-Z]{3}", choice["message"]["content"])
    assert re.fullmatch("[a-z ]{0,9}", choice["message"]["reasoning_content"])
    [silent] = told(thinking, **body, include_reasoning=False)
    assert silent["message"] == {"role": "assistant", "content": choice["message"]["content"], "refusal": None}
    [endless] = told(thinking, tools=None, max_tokens=30, chat_template_kwargs={"thinks": True}, seed=1)
    assert endless["message"]["content"] == "" and endless["message"]["reasoning_content"]
    assert endless["finish_reason"] == "length"
    [over] = told(thinking, tools=None, max_tokens=30, chat_template_kwargs={"thinks": False}, seed=1)
    assert over["message"]["content"] and "reasoning_content" not in over["message"]


def test_a_form_begins_behind_reasoning(thinking: Running) -> None:
    """The prompt has opened it: any text may stand before its end, which the small model never writes."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    open_ = {"chat_template_kwargs": {"thinks": True}, "max_tokens": 30, "seed": 2}
    for more in ({"response_format": form, "tools": None}, {"tool_choice": "required"}):
        [choice] = told(thinking, **open_, **more)
        assert choice["message"]["reasoning_content"] and choice["message"]["content"] == ""
    closed = {"chat_template_kwargs": {"thinks": False}, "seed": 2}
    [choice] = told(thinking, **closed, response_format=form, tools=None)
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    # The answer may leave reasoning out where nobody has opened it.
    [choice] = told(thinking, seed=2, response_format=form, tools=None, temperature=0)
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    [choice] = told(thinking, seed=2, tool_choice=NAMED, temperature=0)
    checked(choice["message"]["tool_calls"][0])


# -- marks that are special tokens --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AsyncLLM, dict[str, int]]]:
    model, ids = marked_model(tmp_path_factory.mktemp("marked"))
    made = AsyncLLM(model, max_batch=4, max_context_len=512)
    yield made, ids
    asyncio.run(made.aclose(drain=False))


@pytest.mark.parametrize("dialect,mark", [("hermes", "<tool_call>"), ("llama3", "<|python_tag|>"),
                                          ("mistral", "[TOOL_CALLS]"), ("newer", "[TOOL_CALLS]")])  # fmt: skip
def test_marks_that_are_special_tokens(
    marked: tuple[AsyncLLM, dict[str, int]], tmp_path: Path, dialect: str, mark: str
) -> None:
    engine, ids = marked
    for web in served(engine, tmp_path, TEMPLATES[dialect]):
        [choice] = told(web, tool_choice="required", parallel_tool_calls=False, seed=1)
        [call] = choice["message"]["tool_calls"]
        checked(call)
        assert dialect == "llama3" or ids[mark] in choice["token_ids"]
        assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
        # The model wants to call: a strict tool binds what follows the mark.
        eager = {"logit_bias": {str(ids[mark]): 1000.0}, "tools": [STRICT], "parallel_tool_calls": False}
        [choice] = told(web, **eager, seed=2, stop=["\n\n"], max_tokens=100)
        assert choice["token_ids"][0] == ids[mark]
        checked(choice["message"]["tool_calls"][0])
        assert len(choice["message"]["tool_calls"]) == 1
        # Nothing binds the answer without `strict`: its text has the mark, which is no call.
        [choice] = told(web, logit_bias={str(ids[mark]): 1000.0}, max_tokens=3)
        assert choice["message"]["content"] == mark * 3 and choice["finish_reason"] == "length"
        [choice] = told(web, logit_bias={str(ids[mark]): 1000.0}, max_tokens=3, tool_choice="none")
        assert choice["message"]["content"] == ""


def test_reasoning_s_marks_that_are_special_tokens(marked: tuple[AsyncLLM, dict[str, int]], tmp_path: Path) -> None:
    engine, ids = marked
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for web in served(engine, tmp_path, THINKING):
        eager = {"logit_bias": {str(ids["</think>"]): 1000.0}, "chat_template_kwargs": {"thinks": True}, "seed": 3}
        [choice] = told(web, **eager, response_format=form, tools=None)
        assert choice["token_ids"][0] == ids["</think>"]
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        [choice] = told(web, **eager, tool_choice=NAMED)
        checked(choice["message"]["tool_calls"][0])
        maybe = {"logit_bias": {str(ids["<think>"]): 1000.0}, "max_tokens": 20, "seed": 1}
        [choice] = told(web, **maybe, tool_choice="required")
        assert choice["token_ids"][0] == ids["<think>"] and choice["message"]["content"] == ""


# -- without a model ----------------------------------------------------------------------------------------------


def test_a_voice_that_thinks_talks_and_calls() -> None:
    text = 'hm</think>\n\nLet me see.\n<tool_call>\n{"name": "now", "arguments": {"a": "é"}}\n</tool_call>'
    for named, reason in ((False, "tool_calls"), (True, "stop")):
        manner = Manner(Dialect("hermes"), ("now",), True, named, False, Thinking("<think>", "</think>", True))
        for pieces in ([text], list(text)):
            voice = Speaking(manner)
            deltas = [delta for piece in pieces for delta in voice.feed(piece)] + voice.finish()
            found = message(deltas)
            [call] = found.pop("tool_calls")
            assert found == {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm"}
            assert call["function"] == {"name": "now", "arguments": '{"a": "é"}'}
            assert voice.reason("stop") == reason and voice.reason("length") == "length"
            assert voice.reason("abort") == "abort"
    silent = Speaking(manner)
    assert silent.feed("") == [] and silent.finish() == [{"content": ""}] and silent.reason("stop") == "stop"


def test_dialects_are_told_by_their_templates() -> None:
    found = {name: detect(template) for name, template in TEMPLATES.items()}
    assert found == {"hermes": "hermes", "llama3": "llama3", "mistral": "mistral", "newer": "mistral"}
    assert Dialect.of(TEMPLATES["newer"]).newer and not Dialect.of(TEMPLATES["mistral"]).newer
    assert detect("{{ messages }}") is detect("{{ tools }}") is detect("<tool_call>") is None
    assert detect("{{ tools }}<tool_call><function=f>") is detect("{{ tools }}<tool_call>f<arg_key>") is None
    assert detect('{{ tools }}<|start_header_id|>"parameters"') == "llama3"
    assert detect_reasoning(THINKING) == ("<think>", "</think>") and detect_reasoning("x") is None
    assert detect_reasoning("[THINK]x[/THINK]") == ("[THINK]", "[/THINK]")
    assert Dialect.of(THINKING, "none", "none") == Dialect()
    assert Dialect.of("", "llama3", "mistral").reasoning == ("[THINK]", "[/THINK]")
