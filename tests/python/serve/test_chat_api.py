"""`/v1/chat/completions`, and the endpoints that generate nothing."""

from __future__ import annotations

from typing import Any

from serve_world import Running
from specrs import LLM, SamplingParams

PATH = "/v1/chat/completions"

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
USER = [{"role": "user", "content": "def f(x):"}]


def conversed(llm: LLM, text: str) -> Any:
    """Return what the model makes of a template's text, which has its special tokens already."""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(text, add_special_tokens=False).ids
    return llm.generate([ids], SamplingParams(**GREEDY))[0]


def test_an_answer_is_that_of_the_template_s_text(web: Running, plain: LLM) -> None:
    want = conversed(plain, "<user>def f(x):\n<assistant>")
    found = web.chat("def f(x):", **GREEDY)
    [choice] = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": want.text, "refusal": None}
    assert found["object"] == "chat.completion" and found["id"].startswith("chatcmpl-")
    assert found["usage"]["prompt_tokens"] == want.usage.prompt_tokens
    parts = [{"role": "user", "content": [{"type": "text", "text": "def f(x):"}]}]
    again = web.post(PATH, messages=parts, **GREEDY).json()
    assert again["choices"][0]["message"] == choice["message"]


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(web: Running) -> None:
    body = {"messages": USER, "n": 2, "seed": 5, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    whole = web.post(PATH, **body, return_token_ids=True).json()
    chunks = web.stream(PATH, **body, return_token_ids=True, stream_options={"include_usage": True})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for i, want in enumerate(whole["choices"]):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == i]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == want["message"]["content"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [want["finish_reason"]]
        assert [t for c in mine for t in c.get("token_ids", [])] == want["token_ids"]
        assert [t for c in mine if c["logprobs"] for t in c["logprobs"]["content"]] == want["logprobs"]["content"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 24


def test_logprobs_have_bytes_and_alternatives(web: Running) -> None:
    [choice] = web.chat("hello", **GREEDY, logprobs=True, top_logprobs=3)["choices"]
    for one in choice["logprobs"]["content"]:
        assert bytes(one["bytes"]).decode() == one["token"] and one["logprob"] <= 0
        assert len(one["top_logprobs"]) == 3 and one["top_logprobs"][0]["token"] == one["token"]  # greedy
    [choice] = web.chat("hello", **GREEDY, logprobs=True)["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []
    assert web.refused(PATH, messages=USER, top_logprobs=2)["param"] == "top_logprobs"
    assert web.refused(PATH, messages=USER, logprobs=True, top_logprobs=21)["param"] == "top_logprobs"


def test_max_tokens_by_both_names(web: Running) -> None:
    found = web.chat("x", max_tokens=9, max_completion_tokens=4, ignore_eos=True)
    assert found["usage"]["completion_tokens"] == 4
    rest = web.chat("x", ignore_eos=True)
    assert rest["usage"]["total_tokens"] == web.service.context and rest["choices"][0]["finish_reason"] == "length"


def test_the_last_message_goes_on(web: Running, plain: LLM) -> None:
    messages = [*USER, {"role": "assistant", "content": "    return"}]
    want = conversed(plain, "<user>def f(x):\n<assistant>    return")
    body = {"messages": messages, "continue_final_message": True, **GREEDY}
    assert web.post(PATH, **body).json()["choices"][0]["message"]["content"] == want.text
    echoed = web.post(PATH, **body, echo=True).json()["choices"][0]["message"]["content"]
    assert echoed == "    return" + want.text
    chunks = web.stream(PATH, **body, echo=True)
    assert "".join(c["delta"].get("content", "") for k in chunks for c in k["choices"]) == echoed
    assert web.refused(PATH, **body, add_generation_prompt=True)["code"] == "template_error"


def test_variables_that_cannot_be_are_refused_by_name(web: Running) -> None:
    for given in ({"messages": []}, {"tools": 1}):
        refused = web.refused(PATH, messages=USER, chat_template_kwargs=given)
        assert (refused["param"], refused["code"]) == ("chat_template_kwargs", "template_error"), refused


def test_reasoning_effort_goes_to_a_template_that_reads_it(web: Running) -> None:
    ids = {
        effort: web.post(PATH, messages=USER, max_tokens=1, return_token_ids=True, reasoning_effort=effort).json()
        for effort in ("low", "high")
    }
    assert ids["low"]["prompt_token_ids"] != ids["high"]["prompt_token_ids"]


def test_messages_that_are_none(web: Running) -> None:
    bad: list[Any] = [None, [], "x", [1], [{}], [{"role": 1}], [{"role": "user", "content": 3}], {"role": "user"},
                      [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
                      [{"role": "user", "content": [{"type": "text"}]}],
                      [{"role": "user", "content": ["x"]}], [{"role": "assistant", "tool_calls": 3}],
                      [{"role": "assistant", "tool_calls": [{}]}],
                      [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}],
                      [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": []}}]}],
                      ]  # fmt: skip
    for messages in bad:
        assert web.refused(PATH, messages=messages)["param"] == "messages"
    assert web.refused(PATH, messages=USER, chat_template="{{ 1 }}")["param"] == "chat_template"
    error = web.refused(PATH, messages=USER * 3000)
    assert error["param"] == "messages" and "max_messages" in error["message"]


def test_models(web: Running) -> None:
    [model] = web.client.get("/v1/models").json()["data"]
    assert model["id"] == "pystdlib-16m" and model["max_model_len"] == 512
    assert web.client.get("/v1/models/pystdlib-16m").json() == model
    missing = web.client.get("/v1/models/gpt-7")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
    answer = web.post("/v1/completions", prompt="x", model="gpt-7")
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "model"
    assert web.complete(prompt="x", model="pystdlib-16m", max_tokens=1)["model"] == "pystdlib-16m"


def test_tokens_there_and_back(web: Running, plain: LLM) -> None:
    text = "def f(x):\n    return 'häß ☃'"
    found = web.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert found["tokens"] == plain.encode(text) and found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 512
    assert web.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": "<|endoftext|>" + text}
    bare = web.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    assert bare == found["tokens"][1:] and web.post("/detokenize", tokens=bare).json() == {"prompt": text}
    chat = web.post("/tokenize", messages=USER).json()
    assert [0, *chat["tokens"]] == plain.encode("<user>def f(x):\n<assistant>")
    assert web.post("/detokenize", tokens=[]).json() == {"prompt": ""}
    for body in ({"tokens": [8192]}, {"tokens": [-1]}, {"tokens": "x"}, {"tokens": [[1], [2]]}, {"tokens": ["a"]}):
        assert web.refused("/detokenize", **body)["param"] == "tokens"
    for body in ({}, {"prompt": "x", "messages": USER}, {"prompt": 3}, {"prompt": "x", "nonsense": 1}):
        web.refused("/tokenize", **body)


def test_how_it_goes(web: Running) -> None:
    assert web.client.get("/health").json() == web.client.get("/ready").json() == {"status": "ok"}
    assert web.client.get("/version").json()["version"]
    load = web.client.get("/load").json()
    assert load["server_load"] == 0 and load["healthy"] is True and 0 <= load["kv_usage"] <= 1
    for path, method in (("/nowhere", "GET"), ("/v1/completions", "GET"), ("/health", "POST"), ("/", "PUT")):
        answer = web.client.request(method, path)
        assert answer.status_code in (404, 405) and answer.json()["error"]["message"]


def test_earlier_calls_reach_the_template_as_objects(web: Running, plain: LLM) -> None:
    source = "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}
    old, web.service.template = web.service.template, source
    try:
        found = web.post("/tokenize", messages=[{"role": "assistant", "tool_calls": [call]}]).json()
    finally:
        web.service.template = old
    assert web.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": '{"a": [1, "é"]}'}
