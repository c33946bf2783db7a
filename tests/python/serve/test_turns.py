"""Messages as a template gets them: calls that the server itself cut come back as they are, and no role vanishes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from serve_world import Running, running
from specrs import LLM
from specrs.engine import AsyncLLM
from specrs.serve.turns import arguments
from specrs.tools.scanner import MAX_DEPTH
from tools_world import TEMPLATES

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "Weather?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "minLength": 40}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
#: ChatML's families write such templates: a role that the template does not know is dropped in silence.
CLOSED = """{% for m in messages %}{% if m.role == 'system' or m['role'] in ["user", "assistant", 'tool'] -%}
<{{ m.role }}>{{ m.content }}
{% endif %}{% endfor %}"""


@contextmanager
def templated(web: Running, source: str) -> Iterator[None]:
    old, web.service.template = web.service.template, source
    try:
        yield
    finally:
        web.service.template = old


def text_of(web: Running, messages: list[dict[str, Any]], **more: Any) -> str:
    tokens = web.post("/tokenize", messages=messages, **more).json()["tokens"]
    return str(web.post("/detokenize", tokens=tokens).json()["prompt"])


def called(arguments: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    calls = [{"id": "abcdefghi", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


@pytest.mark.parametrize("dialect", TEMPLATES)
@pytest.mark.parametrize("most", [12, 25, 40, 60])
def test_a_call_that_was_cut_goes_back(engine: AsyncLLM, tmp_path: Path, dialect: str, most: int) -> None:
    template = tmp_path / "dialect.jinja"
    template.write_text(TEMPLATES[dialect])
    with running(engine, tmp_path, chat_template=str(template)) as web:
        body = {"messages": USER, "tools": TOOLS, "tool_choice": "required", "seed": 1, "max_tokens": most}
        [choice] = web.post(PATH, **body).json()["choices"]
        assert choice["finish_reason"] == "length"
        said = choice["message"]
        calls = said.get("tool_calls", [])
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "not JSON"} for call in calls]
        back = web.post(PATH, messages=[*USER, said, *results], tools=TOOLS, max_tokens=2)
        assert back.status_code == 200, back.text
        for call in calls:
            told = call["function"]["arguments"]
            with pytest.raises(json.JSONDecodeError):
                json.loads(told)
            text = text_of(web, [*USER, said, *results], tools=TOOLS)
            assert (json.dumps(told, ensure_ascii=False) if told else "{}") in text


@pytest.mark.parametrize("text", [
    '{"city": "Os', "{", "not JSON", '["a"]', "3", '"x"', '{"a": NaN}', '{"a": "\\ud800"}', '{"a": ' + "9" * 5000 + "}",
    '{"a": ' * MAX_DEPTH + "1" + "}" * MAX_DEPTH, '{"a": ' * 60 + "1" + "}" * 60, "[" * 20_000,
])  # fmt: skip
def test_arguments_that_are_no_object_reach_the_template_as_text(web: Running, text: str) -> None:
    for source in (
        "{% for m in messages %}{% for c in m.tool_calls %}"
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% endif %}{% endfor %}{% endfor %}",
        # A family whose template goes through them
        "{% for m in messages %}{% for c in m.tool_calls %}"
        "{% for name, value in c.function.arguments | items %}{{ value }}{% endfor %}{% endfor %}{% endfor %}",
    ):
        with templated(web, source):
            assert text_of(web, [called(text)]) == text


def test_arguments_that_are_an_object_reach_it_as_one() -> None:
    assert arguments('{"a": [1, "é"]}') == {"a": [1, "é"]}
    for nothing in ("", " \n", "{}", "null"):
        assert arguments(nothing) == {}


def test_what_a_template_refuses_otherwise_is_refused_still(web: Running) -> None:
    with templated(web, "{{ raise_exception('no calls') }}"):
        error = web.refused("/tokenize", messages=[called('{"a')])
    assert error["code"] == "template_error" and "no calls" in error["message"]


def test_a_developer_s_message_is_the_system_s_where_the_template_knows_no_developer(web: Running, plain: LLM) -> None:
    told = [{"role": "developer", "content": "ALWAYS ANSWER IN FRENCH"}, *USER]
    with templated(web, CLOSED):
        assert text_of(web, told) == "<system>ALWAYS ANSWER IN FRENCH\n<user>Weather?\n"
        [choice] = web.post(PATH, messages=told, max_tokens=4, temperature=0).json()["choices"]
        as_system = [{**told[0], "role": "system"}, *USER]
        assert web.post(PATH, messages=as_system, max_tokens=4, temperature=0).json()["choices"] == [choice]
    with templated(web, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"):
        assert text_of(web, told) == "<system>ALWAYS ANSWER IN FRENCH<user>Weather?"
    known = '{% for m in messages %}{% if m.role == "developer" %}!{% endif %}{{ m.content }}{% endfor %}'
    with templated(web, known):
        assert text_of(web, told) == "!ALWAYS ANSWER IN FRENCHWeather?"


@pytest.mark.parametrize("role", ["wizard", "", "System", "function", "x" * 100_000, "user\n"])
def test_an_unknown_role_is_refused_by_name(web: Running, role: str) -> None:
    with templated(web, CLOSED):
        for path in (PATH, "/tokenize"):
            error = web.refused(path, messages=[*USER, {"role": role, "content": "x"}])
            assert error["param"] == "messages" and error["message"].startswith("messages[1].role = ")
            assert role[:20] in error["message"].replace("\\n", "\n")
            for one in ("system", "developer", "user", "assistant", "tool"):
                assert one in error["message"]


def test_a_role_that_the_template_names_is_known(web: Running) -> None:
    with templated(web, "{% for m in messages %}{% if m.role == 'ipython' %}>{% endif %}{{ m.content }}{% endfor %}"):
        assert text_of(web, [{"role": "ipython", "content": "42"}, *USER]) == ">42Weather?"


def test_a_template_of_the_request_s_own_names_its_roles(engine: AsyncLLM, tmp_path: Path) -> None:
    own = "{% for m in messages %}{% if m.role == 'judge' %}{{ m.content }}{% endif %}{% endfor %}"
    with running(engine, tmp_path, trust_request_chat_template=True) as web:
        assert text_of(web, [{"role": "judge", "content": "x"}], chat_template=own) == "x"
        assert web.refused("/tokenize", messages=[{"role": "clerk", "content": "x"}], chat_template=own)
