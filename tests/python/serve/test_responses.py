"""`/v1/responses`: the items and events that OpenAI's client reads, over the prompts, tools and forms of a chat."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import TypeAdapter

from serve_fuzz import damaged, encode
from serve_world import Running, running
from specrs.engine import AsyncLLM
from specrs.serve.calling import Manner, Speaking
from specrs.serve.fields import RESPONSES, TABLE
from specrs.serve.responses_events import Output
from specrs.tools import Dialect, Thinking
from tools_world import THINKING

types = pytest.importorskip("openai.types.responses")
PATH, CHAT = "/v1/responses", "/v1/chat/completions"
EVENT, RESPONSE = TypeAdapter(types.ResponseStreamEvent), TypeAdapter(types.Response)
SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"], "additionalProperties": False,
}  # fmt: skip
WEATHER: dict[str, Any] = {"type": "function", "name": "get_weather", "description": "Tells the weather.",
                           "parameters": SCHEMA, "strict": False}  # fmt: skip
NOW: dict[str, Any] = {"type": "function", "name": "now"}
NAMED = {"type": "function", "name": "get_weather"}
GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 20}
LOGPROBS = ["message.output_text.logprobs"]


@pytest.fixture(scope="module")
def spoken(engine: AsyncLLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose template has tools and reasoning."""
    folder = tmp_path_factory.mktemp("spoken")
    path = folder / "dialect.jinja"
    path.write_text(THINKING, encoding="utf-8")
    with running(engine, folder, chat_template=str(path)) as made:
        yield made
        made.idle()


def events(text: str) -> list[dict[str, Any]]:
    """Return a whole stream's events, each as the client's own model has it: no field is missing, none has another
    type."""
    found = []
    for i, block in enumerate(block for block in text.split("\n\n") if block and not block.startswith(":")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == i
        typed = EVENT.validate_json(data.removeprefix("data: "), strict=True)
        assert typed.type == event["type"]
        found.append(event)
    return found


def folded(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a stream's events make, each event by what it must say of the item before it."""
    items: list[dict[str, Any]] = []
    done: list[dict[str, Any]] = []
    for event in told:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) == len(done) and event["item"]["status"] == "in_progress"
            items.append({**event["item"], "text": "", "scores": []})
            continue
        if "output_index" not in event:
            continue
        item = items[event["output_index"]]
        assert event["output_index"] == len(items) - 1 and event.get("item_id", item["id"]) == item["id"]
        if kind.endswith(".delta"):
            item["text"] += event["delta"]
            item["scores"] += event.get("logprobs", [])
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == item["text"]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == item["text"]
        elif kind == "content_part.added":
            assert event["part"]["text"] == "" and item["content"] == []
        elif kind == "content_part.done":
            assert event["part"]["text"] == item["text"]
        else:
            assert kind == "output_item.done"
            whole = event["item"]
            assert whole["id"] == item["id"] and whole["type"] == item["type"] and whole["status"] != "in_progress"
            if whole["type"] == "function_call":
                assert whole["arguments"] == item["text"]
            else:
                assert [part["text"] for part in whole["content"]] == [item["text"]]
                scores = whole["content"][0].get("logprobs", [])
                assert scores[: len(item["scores"])] == item["scores"]  # the rest, if any, has no text
            done.append(whole)
    return done


def plain(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without ids, which are of one answer."""
    return [{key: one for key, one in item.items() if key not in ("id", "call_id")} for item in items]


def told(web: Running, **body: Any) -> dict[str, Any]:
    """The response to a request, whole; and the same of a stream, but for ids and times."""
    body = {"seed": 3, **body}
    answer = web.post(PATH, **body)
    assert answer.status_code == 200, answer.text
    RESPONSE.validate_json(answer.text, strict=True)
    found: dict[str, Any] = answer.json()
    stream = web.post(PATH, **body, stream=True)
    assert stream.status_code == 200, stream.text
    assert stream.headers["content-type"].startswith("text/event-stream")
    happened = events(stream.text)
    kinds = [event["type"] for event in happened]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == f"response.{found['status']}"
    last = happened[-1]["response"]
    assert folded(happened) == last["output"]
    changing = ("id", "created_at", "completed_at", "output", "usage", "specrs", "metrics")
    assert {k: v for k, v in last.items() if k not in changing} == {k: v for k, v in found.items() if k not in changing}
    assert plain(last["output"]) == plain(found["output"])
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert last["usage"][name] == found["usage"][name]
    for begun in happened[:2]:
        assert begun["response"]["status"] == "in_progress" and begun["response"]["id"] == last["id"]
    return found


def words(response: dict[str, Any]) -> str:
    """Return what the client calls ``output_text``."""
    return "".join(p["text"] for item in response["output"] if item["type"] == "message" for p in item["content"])


# -- text ---------------------------------------------------------------------------------------------------------


def test_an_answer_is_that_of_the_chat(web: Running) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "def f(x):"}]
    chat = web.post(CHAT, messages=messages, temperature=0, max_tokens=20).json()
    found = told(web, input="def f(x):", instructions="Be short.", metadata={"a": "b"}, **GREEDY)
    [item] = found["output"]
    assert words(found) == chat["choices"][0]["message"]["content"] and item["role"] == "assistant"
    assert found["object"] == "response" and found["id"].startswith("resp_") and item["id"].startswith("msg_")
    assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert found["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    assert found["metadata"] == {"a": "b"} and found["instructions"] == "Be short." and found["store"] is False
    same = told(web, input=[{"role": "developer", "content": "Be short."}, {"type": "message", "role": "user",
                "content": [{"type": "input_text", "text": "def f(x):"}]}], **GREEDY)  # fmt: skip
    assert words(same) == words(found)
    counted = web.post("/v1/responses/input_tokens", input="def f(x):", instructions="Be short.").json()
    assert counted == {"object": "response.input_tokens", "input_tokens": found["usage"]["input_tokens"]}


def test_a_seed_gives_the_same_tokens_with_and_without_drafts(web: Running) -> None:
    body = {"input": "class Stack:", "temperature": 0.8, "top_p": 0.95, "seed": 7, "max_output_tokens": 40}
    found = told(web, **body, return_spec_stats=True)
    assert words(found) == words(told(web, **body, speculative=False))
    assert found["temperature"] == 0.8 and found["top_p"] == 0.95
    assert found["metrics"]["speculative_decoding"]["num_draft_tokens"] == found["specrs"]["draft_tokens"]


def test_what_ends_an_answer(web: Running) -> None:
    cut = told(web, input="x", max_output_tokens=5, ignore_eos=True)
    assert cut["status"] == "incomplete" and cut["incomplete_details"] == {"reason": "max_output_tokens"}
    assert cut["output"][0]["status"] == "incomplete" and cut["usage"]["output_tokens"] == 5
    assert cut["max_output_tokens"] == 5 and cut["error"] is None and cut["completed_at"] is None
    full = words(told(web, input="def f(x):", temperature=0, max_output_tokens=40))
    stopped = told(web, input="def f(x):", temperature=0, max_output_tokens=40, stop=[full[8:12]])
    assert stopped["status"] == "completed" and words(stopped) == full[: full.index(full[8:12])]
    assert stopped["output"][0]["status"] == "completed" and stopped["incomplete_details"] is None
    nothing = told(web, input="def f(x):", temperature=0, max_output_tokens=40, stop=[full[0]])
    assert words(nothing) == "" and [item["type"] for item in nothing["output"]] == ["message"]


def test_logprobs_are_of_the_message_s_tokens(web: Running, spoken: Running) -> None:
    found = told(web, input="hello", include=LOGPROBS, top_logprobs=2, **GREEDY)
    [item] = found["output"]
    scores = item["content"][0]["logprobs"]
    assert "".join(one["token"] for one in scores) == words(found) and len(scores) == 20
    assert all(len(one["top_logprobs"]) == 2 and one["bytes"] for one in scores)
    form = {"grammar": r'start: "<think>\n" /[a-z ]{3,9}/ "\n</think>\n\n" /[A-Z]{3}/'}
    found = told(spoken, input="x", structured_outputs=form, seed=5, include=LOGPROBS)
    scores = found["output"][-1]["content"][0]["logprobs"]
    reasoning = found["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert reasoning > 0 and reasoning + len(scores) == found["usage"]["output_tokens"]
    assert "".join(one["token"] for one in scores).replace("<|endoftext|>", "").strip().startswith(words(found))
    error = spoken.refused(PATH, input="x", include=LOGPROBS, tools=[WEATHER])
    assert error["param"] == "include" and error["code"] == "unsupported_parameter"
    assert told(spoken, input="x", include=LOGPROBS, tools=[WEATHER], tool_choice="none", **GREEDY)["output"]


def test_forms(web: Running) -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    found = told(web, input="x", text=form, seed=1, max_output_tokens=100)
    assert found["status"] == "completed" and found["text"]["format"] == form["format"]
    jsonschema.validate(json.loads(words(found)), SCHEMA)
    found = told(web, input="x", text={"format": {"type": "json_object"}}, seed=2, max_output_tokens=200)
    assert found["status"] == "incomplete" or isinstance(json.loads(words(found)), dict)
    assert told(web, input="x", text={"format": {"type": "text"}, "verbosity": "medium"}, **GREEDY)["output"]
    for schema in ({"type": "nonsense"}, {"type": "object", "properties": {"a": {"pattern": "("}}}):
        error = web.refused(PATH, input="x", text={"format": {"type": "json_schema", "name": "x", "schema": schema}})
        assert error["param"] == "text" and error["code"] == "invalid_grammar" and error["message"].startswith("text")


def test_the_oldest_turns_give_way(web: Running) -> None:
    turns = [
        {"role": role, "content": f"turn {i} " + "word " * 20} for i in range(30) for role in ("user", "assistant")
    ]
    items = [*turns, {"role": "user", "content": "the last"}]
    body = {"input": items, "instructions": "Stay.", **GREEDY}
    error = web.refused(PATH, **body)
    assert error["code"] == "context_length_exceeded" and error["param"] == "input"
    found = told(web, **body, truncation="auto")
    used = found["usage"]["input_tokens"]
    assert found["truncation"] == "auto" and used <= web.service.context - 20
    # The server keeps as many turns as fit: one more would not.
    kept = next(i for i in range(0, len(items), 2) if counted(web, items[i:]) == used)
    assert counted(web, items[kept - 2 :]) > web.service.context - 20
    error = web.refused(PATH, input="word " * 900, truncation="auto")
    assert error["code"] == "context_length_exceeded"
    error = web.refused(PATH, input="x", max_output_tokens=600)
    assert error["param"] == "max_output_tokens" and "max_output_tokens = 600" in error["message"]


def counted(web: Running, items: list[dict[str, Any]]) -> int:
    answer = web.post("/v1/responses/input_tokens", input=items, instructions="Stay.")
    return int(answer.json()["input_tokens"])


# -- tools and reasoning ------------------------------------------------------------------------------------------


def test_calls_and_their_outputs(spoken: Running) -> None:
    body = {"input": "Weather?", "tools": [WEATHER, NOW], "max_output_tokens": 150}
    for seed in range(2):
        for choice in ("required", NAMED, {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}):
            found = told(spoken, **body, tool_choice=choice, seed=seed)
            assert found["tool_choice"] == choice and found["tools"] == body["tools"]
            for item in found["output"]:
                assert item["type"] == "function_call" and item["id"].startswith("fc_")
                assert re.fullmatch("call_[0-9a-f]{24}", item["call_id"])
                if item["status"] == "completed":
                    schema = SCHEMA if item["name"] == "get_weather" else {"type": "object"}
                    jsonschema.validate(json.loads(item["arguments"]), schema)
    [call] = told(spoken, **body, tool_choice=NAMED, temperature=0, parallel_tool_calls=False)["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    items = [{"role": "user", "content": "Weather?"}, call, result]
    assert told(spoken, input=items, tools=[WEATHER], **GREEDY)["status"] in ("completed", "incomplete")
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": call["call_id"], "type": "function", "function": {
            "name": call["name"], "arguments": call["arguments"]}}]},
        {"role": "tool", "tool_call_id": call["call_id"], "content": "sunny"},
    ]  # fmt: skip
    function = {key: one for key, one in WEATHER.items() if key != "type"}
    chat = spoken.post("/tokenize", messages=messages, tools=[{"type": "function", "function": function}]).json()
    mine = spoken.post("/v1/responses/input_tokens", input=items, tools=[WEATHER]).json()
    assert mine["input_tokens"] == chat["count"]


def test_reasoning_is_an_item(spoken: Running) -> None:
    form = {"grammar": r'start: "<think>\n" /[a-z ]{3,9}/ "\n</think>\n\n" /[A-Z]{3}/'}
    found = told(spoken, input="x", structured_outputs=form, seed=5)
    thought, message = found["output"]
    assert thought["type"] == "reasoning" and thought["id"].startswith("rs_") and thought["summary"] == []
    assert re.fullmatch("[a-z ]{0,9}", thought["content"][0]["text"]) and re.fullmatch("[A-Z]{3}", words(found))
    [silent] = told(spoken, input="x", structured_outputs=form, seed=5, include_reasoning=False)["output"]
    assert silent["content"] == message["content"]
    endless = told(spoken, input="Weather?", max_output_tokens=30, chat_template_kwargs={"thinks": True}, seed=1)
    assert [(item["type"], item["status"]) for item in endless["output"]] == [("reasoning", "incomplete")]
    assert endless["usage"]["output_tokens_details"]["reasoning_tokens"] == 30
    over = told(spoken, input="x", max_output_tokens=30, chat_template_kwargs={"thinks": False}, seed=1)
    assert over["usage"]["output_tokens_details"]["reasoning_tokens"] == 0 and words(over)
    # Sent back, it reaches the template with the answer behind it.
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": words(found),
            "reasoning_content": thought["content"][0]["text"]}, {"role": "user", "content": "y"}]  # fmt: skip
    items = [{"role": "user", "content": "x"}, *found["output"], {"role": "user", "content": "y"}]
    own = "{% for m in messages %}{{ m.role }}:{{ m.content }}:{{ m.reasoning_content }}|{% endfor %}<think></think>"
    with_own(spoken, own, items, chat)


def with_own(web: Running, template: str, items: list[dict[str, Any]], chat: list[dict[str, Any]]) -> None:
    """Items and messages make the same prompt, by a template that shows all of them."""
    folder = Path(web.service.config.chat_template).parent
    (folder / "own.jinja").write_text(template, encoding="utf-8")
    with running(web.engine, folder, chat_template=str(folder / "own.jinja")) as other:
        mine = other.post("/v1/responses/input_tokens", input=items).json()
        assert mine["input_tokens"] == other.post("/tokenize", messages=chat).json()["count"]


@pytest.mark.parametrize("seed", range(20))
def test_items_do_not_depend_on_the_pieces(seed: int) -> None:
    """Any pieces of a text give the items of the whole, and events that make them."""
    rng = random.Random(seed)
    call = '<tool_call>\n{"name": "now", "arguments": {"a": [1, "é"]}}\n</tool_call>'
    text = "".join(
        rng.choice(["<think>", "</think>", "hm. ", "\n", call, call[:40], "é", " {", "so "]) for _ in range(12)
    )
    manner = Manner(Dialect("hermes", None, ()), ("now",), thinking=Thinking("<think>", "</think>", rng.random() < 0.5))

    def made(pieces: list[str]) -> list[dict[str, Any]]:
        output, voice = Output(), Speaking(manner)
        happened = [event for piece in pieces for event in output.take(voice.feed(piece))]
        happened += output.take(voice.finish()) + output.end(False)
        assert folded(happened) == output.items
        return plain(output.items)

    whole = made([text])
    for _ in range(20):
        cuts = sorted(rng.sample(range(1, len(text)), min(len(text) - 1, rng.randint(1, 9))))
        assert made([text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole


# -- what is refused ----------------------------------------------------------------------------------------------


def test_every_field_of_openai_s_requests_has_a_class() -> None:
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    mine = [one.name for one in TABLE if RESPONSES in one.endpoints]
    assert len(mine) == len(set(mine)), "a field twice"
    assert {*ResponseCreateParamsBase.__annotations__, "stream"} <= set(mine)


ITEMS: list[Any] = [
    3, [], {}, [3], [{}], [{"type": "message"}], [{"role": "robot", "content": "x"}], [{"role": 3, "content": "x"}],
    [{"role": "user"}], [{"role": "user", "content": 3}], [{"role": "user", "content": [{"type": "input_image"}]}],
    [{"role": "user", "content": [{"type": "input_text"}]}], [{"role": "user", "content": ["x"]}],
    [{"type": "item_reference", "id": "msg_1"}], [{"type": "web_search_call", "id": "x"}], [{"type": ["message"]}],
    [{"type": "function_call", "name": "f", "arguments": "{}"}],
    [{"type": "function_call", "call_id": "c", "name": "f"}],
    [{"type": "function_call", "call_id": "c", "name": 3, "arguments": "{}"}], [{"type": "reasoning", "summary": []}],
    [{"type": "function_call_output", "call_id": "c", "output": "x"}], [{"role": "user", "content": "x"}] * 2049,
    [{"type": "reasoning", "content": 3, "summary": []}], [{"type": "reasoning", "content": [{}], "summary": []}],
    [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
     {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}],
]  # fmt: skip


@pytest.mark.parametrize("param,body", [
    *(("input", {"input": items}) for items in ITEMS), ("input", {"input": None}),
    ("instructions", {"instructions": ["x"]}), ("max_output_tokens", {"max_output_tokens": 0}),
    ("text", {"text": 3}), ("text", {"text": {"format": 3}}), ("text", {"text": {"format": {"type": "xml"}}}),
    ("text", {"text": {"format": {"type": "json_schema", "schema": {}}}}), ("text", {"text": {"formt": {}}}),
    ("text", {"text": {"format": {"type": "json_schema", "name": "x"}}}), ("text", {"text": {"verbosity": "low"}}),
    ("reasoning", {"reasoning": "high"}), ("reasoning", {"reasoning": {"effort": "high"}}),
    ("reasoning", {"reasoning": {"summary": "detailed"}}), ("reasoning", {"reasoning": {"budget": 3}}),
    ("include", {"include": "x"}), ("include", {"include": ["nothing"]}), ("top_logprobs", {"top_logprobs": 2}),
    ("top_logprobs", {"include": LOGPROBS, "top_logprobs": 21}), ("truncation", {"truncation": "some"}),
    ("metadata", {"metadata": {"a": 1}}), ("metadata", {"metadata": {"a": "b" * 600}}),
    ("tools", {"tools": [{"type": "web_search"}]}), ("tools", {"tools": [{"type": "function"}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}), ("tools", {"tools": [NOW, NOW]}),
    ("tools", {"tools": [{**NOW, "defer_loading": True}]}), ("tools", {"tools": [{"type": "mcp"}]}),
    ("tools", {"tools": [{**NOW, "parameters": {"type": "string"}}]}), ("tools", {"tools": [WEATHER] * 129}),
    ("tool_choice", {"tool_choice": "always"}), ("tool_choice", {"tool_choice": {"type": "web_search_preview"}}),
    ("tool_choice", {"tools": [NOW], "tool_choice": NAMED}), ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "now"}}}),
    ("tool_choice", {"tools": [NOW], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}),
    ("previous_response_id", {"previous_response_id": "resp_1"}), ("conversation", {"conversation": "conv_1"}),
    ("background", {"background": True}), ("prompt", {"prompt": {"id": "p"}}), ("n", {"n": 2}),
    ("context_management", {"context_management": [{"type": "compaction"}]}), ("moderation", {"moderation": {}}),
    ("background_options", {"background_options": {"completion_window": "2h"}}), ("seed", {"seed": "x"}),
    ("return_spec_stats", {"return_spec_stats": "rounds"}), ("temperature", {"temperature": -1}),
    ("messages", {"messages": []}), ("max_tokens", {"max_tokens": 3}), ("response_format", {"response_format": {}}),
    ("stop", {"stop": 3}), ("guided_regex", {"guided_regex": "a", "text": {"format": {"type": "json_object"}}}),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_name(spoken: Running, param: str, body: dict[str, Any]) -> None:
    error = spoken.refused(PATH, **{"input": "x", **body})
    assert error["param"] == param, error
    assert not error["message"].startswith("messages")


def test_what_changes_nothing_is_taken(web: Running) -> None:
    harmless = {
        "store": True, "user": "u", "safety_identifier": "s", "service_tier": "auto", "prompt_cache_key": "k",
        "prompt_cache_retention": "24h", "max_tool_calls": 3, "background": False, "previous_response_id": None,
        "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto", "effort": None}, "tools": [],
        "n": 1, "truncation": "disabled", "tool_choice": "auto",
        "parallel_tool_calls": True, "text": {}, "metadata": {}, "top_logprobs": 0,
    }  # fmt: skip
    alone = told(web, input="def f(x):", **GREEDY)
    assert words(web.post(PATH, input="def f(x):", **harmless, **GREEDY).json()) == words(alone)
    options = {"stream": True, "stream_options": {"include_obfuscation": False}}
    last = events(web.post(PATH, input="def f(x):", **options, **harmless, **GREEDY).text)[-1]
    assert words(last["response"]) == words(alone)


def test_nothing_is_stored(web: Running) -> None:
    found = told(web, input="x", **GREEDY)
    for method, path in (("GET", found["id"]), ("DELETE", found["id"]), ("POST", f"{found['id']}/cancel"),
                         ("GET", f"{found['id']}/input_items"), ("POST", "compact")):  # fmt: skip
        answer = web.client.request(method, f"{PATH}/{path}")
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found", (method, path)
        assert "stored" in answer.json()["error"]["message"]


def test_a_response_s_model(web: Running) -> None:
    answer = web.post(PATH, input="x", model="nobody")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    label = re.compile(r'^specrs:http_responses_total\{(?=.*path="/v1/responses")(?=.*status="404")', re.M)
    for _ in range(50):  # a response is counted once it is over, which its client may see first
        if label.search(web.client.get("/metrics").text):
            break
        time.sleep(0.1)
    else:
        pytest.fail("the path has no label of its own")


# -- what goes wrong ----------------------------------------------------------------------------------------------


def test_clients_that_leave(web: Running) -> None:
    endless = {"input": "x", "ignore_eos": True, "temperature": 1.0}
    for stream in (True, False):
        sock = web.raw(PATH, {**endless, "stream": stream})
        if stream:
            sock.recv(64)
        sock.close()
        web.idle()


def test_a_server_that_ends(web: Running) -> None:
    """Responses that run then are told as failed, with the text that there is."""

    def abort() -> None:
        for stream in list(web.service._live):
            stream.abort()

    body = {"input": "x", "ignore_eos": True, "stream": True}
    with web.client.stream("POST", PATH, json=body) as answer:
        parts = answer.iter_text()
        text = ""
        while "output_text.delta" not in text:
            text += next(parts)
        web.loop.call_soon_threadsafe(abort)
        text += "".join(parts)
    happened = events(text)
    last = happened[-1]
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"
    assert folded(happened) == last["response"]["output"] and words(last["response"])


def test_an_error_within_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open items end, then come both of the events that clients know errors by."""
    engine = AsyncLLM(max_batch=2, max_context_len=256)
    runner, left = engine.llm._runner, [6]  # type: ignore[union-attr]
    sound = runner.round

    def failing(part: Any, **more: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("injected: /secret/path")
        return sound(part, **more)

    monkeypatch.setattr(runner, "round", failing)
    try:
        with running(engine, tmp_path) as web:
            body = {"input": "def f(x):", "ignore_eos": True, "speculative": False, "max_output_tokens": 60}
            answer = web.post(PATH, **body, stream=True)
            happened = events(answer.text)
            error, last = happened[-2:]
            assert error["type"] == "error" and error["code"] == "step_failed" and "secret" not in answer.text
            assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
            assert last["response"]["error"] == {"code": "server_error", "message": error["message"]}
            [item] = folded(happened)
            assert item["status"] == "incomplete" and last["response"]["output"] == [item]
            left[0] = 3
            whole = web.post(PATH, **body)
            assert whole.status_code == 500 and whole.json()["error"]["code"] == "step_failed"
            assert told(web, input="x", **GREEDY)["output"]
            web.idle()
    finally:
        asyncio.run(engine.aclose(drain=False))


def test_nonsense_is_refused(spoken: Running) -> None:
    """Bodies that were right before something happened to them: 200 or 400, never a fault of the server's."""
    rng, answers = random.Random(11), Counter[int]()
    base = {
        "input": [
            {"role": "developer", "content": "s"},
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "7"},
        ],
        "instructions": "i", "max_output_tokens": 2, "tools": [WEATHER, NOW], "tool_choice": "auto", "include": [],
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}, "reasoning": {"summary": "auto"},
        "metadata": {"a": "b"}, "truncation": "auto", "stream": False, "top_logprobs": 0, "store": True,
    }  # fmt: skip
    for _ in range(300):
        body = json.loads(json.dumps(base))
        for _ in range(rng.randint(1, 3)):
            damaged(rng, body)
        if not isinstance(body.get("max_output_tokens"), int) or body["max_output_tokens"] > 2:
            body["max_output_tokens"] = 2
        answer = spoken.client.post(PATH, content=encode(body), headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400), (answer.text, body)
        if answer.status_code == 400:
            assert answer.json()["error"]["message"]
        elif body.get("stream") is not True:
            RESPONSE.validate_json(answer.text)
        answers[answer.status_code] += 1
    assert answers[200] > 20 and answers[400] > 100, answers
