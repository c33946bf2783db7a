"""Chat templates: the text of transformers' `apply_chat_template`, whatever the template does."""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import threading
import time
from pathlib import Path
from typing import Any

import jinja2
import pytest
import transformers
from transformers import AutoTokenizer

from chat_corpus import CHATS, TEMPLATES, TOOLS
from modelzoo import write_json, write_tokenizer
from specrs import ConfigError
from specrs.chat import ChatLimitError, ChatTemplateError, ChatTemplates, RenderLimits, apart

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
FILES = "tokenizer_config.json"
# The last transformers for Python 3.10 is 5.20; 5.21 leaves out what is None, and has a name of its own for reasoning.
OLD = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 21)


def model(directory: Path, config: dict[str, Any] | None = None, **files: str) -> Path:
    """A model directory, as far as chat goes; `files`: additional templates, or the default."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    write_json(directory / FILES, {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL, **(config or {})})
    for name, text in files.items():
        path = directory / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[ChatTemplates, Any]:
    directory = model(tmp_path_factory.mktemp("chat") / "plain")
    return ChatTemplates.of(directory), AutoTokenizer.from_pretrained(directory)


def as_since_5_21(message: Any) -> Any:
    message = {key: value for key, value in message.items() if value is not None}
    named = [message[key] for key in ("reasoning_content", "thinking", "reasoning") if key in message]
    return {"thinking": named[0], **message, "reasoning_content": named[0]} if named else message


def theirs(tokenizer: Any, messages: Any, **options: Any) -> str | None:
    """transformers' text; None where it refuses."""
    if OLD:
        messages = [as_since_5_21(message) for message in messages]
    given = options.pop("chat_template_kwargs", None) or {}
    options = {"add_generation_prompt": True, **options, **given}
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except (jinja2.TemplateError, TypeError, ValueError):
        return None


def ours(templates: ChatTemplates, messages: Any, **options: Any) -> str | None:
    try:
        return templates.render(messages, **options)
    except ChatTemplateError:
        return None


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_construct_gives_the_text_of_transformers(name: str, plain: tuple[ChatTemplates, Any]) -> None:
    templates, tokenizer = plain
    rendered = 0
    for messages in CHATS.values():
        for more in ({}, {"add_generation_prompt": False}, {"tools": TOOLS},
                     {"chat_template_kwargs": {"enable_thinking": False, "documents": [{"title": "t", "text": "x"}]}},
                     {"chat_template_kwargs": {"bos_token": "<bos>", "date_string": "1 Jan"}}):  # fmt: skip
            options: dict[str, Any] = {"chat_template": TEMPLATES[name], **more}
            before = copy.deepcopy(messages)
            want = theirs(tokenizer, messages, **options)
            assert ours(templates, messages, **options) == want, (messages, more)
            assert messages == before
            rendered += want is not None
    assert rendered >= 5


@pytest.mark.parametrize("name", ["chatml", "parts", "generation", "reasoning", "blocks_are_trimmed", "scopes"])
@pytest.mark.parametrize("field", [True, "content", "reasoning_content", "thinking", "reasoning"])
def test_the_last_message_is_continued_where_transformers_cuts_it(
    name: str, field: bool | str, plain: tuple[ChatTemplates, Any]
) -> None:
    if OLD and field not in (True, "content"):
        pytest.skip(f"transformers {transformers.__version__} marks one of the names that a template may read")
    templates, tokenizer = plain
    trimming = TEMPLATES[name].replace("m.content }}", "m.content | trim }}")
    for source in {TEMPLATES[name], trimming}:
        for messages in CHATS.values():
            options: dict[str, Any] = {
                "chat_template": source, "add_generation_prompt": False, "continue_final_message": field,
            }  # fmt: skip
            want = theirs(tokenizer, messages, **options)
            if want is not None:  # transformers leaves the first mark of a message that is written twice
                want = want.replace("CONTINUE_FINAL_MESSAGE_TAG ", "").replace("CONTINUE_FINAL_MESSAGE_TAG", "")
            assert ours(templates, messages, **options) == want, (source, messages)
    source = "{% for m in messages %}{{ m.content }}{% endfor %}|end"
    last = {"chat_template": source, "add_generation_prompt": False, "continue_final_message": True}
    assert ours(templates, CHATS["turns"], **last) == theirs(tokenizer, CHATS["turns"], **last)
    mark = "SPECRS_CONTINUES_HERE "
    about = [{"role": "user", "content": f"{mark}{mark.strip()}_"}, {"role": "assistant", "content": f"it is {mark}"}]
    assert ours(templates, about, **last) == theirs(tokenizer, about, **last) == f"{mark}{mark.strip()}_it is {mark}"


def test_a_message_that_cannot_go_on_is_refused(plain: tuple[ChatTemplates, Any]) -> None:
    templates, _ = plain
    go_on: dict[str, Any] = {"chat_template": TEMPLATES["chatml"], "continue_final_message": True}
    with pytest.raises(ChatTemplateError, match="add_generation_prompt=False lets it go on"):
        templates.render(CHATS["one"], **go_on)
    go_on["add_generation_prompt"] = False
    for content in (None, 3, [], [{"type": "image"}]):
        with pytest.raises(ChatTemplateError, match=r"messages\[0\]: no text in 'content' to continue"):
            templates.render([{"role": "user", "content": content}], **go_on)
    go_on["chat_template"] = "{{ messages[0].content[:3] }}"
    with pytest.raises(ChatTemplateError, match="drops the end of the last message"):
        templates.render(CHATS["one"], **go_on)


def test_sources_come_in_order(tmp_path: Path) -> None:
    both = [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "listed tools"}]
    cases: list[tuple[Path, dict[str, str | None]]] = [
        (model(tmp_path / "a", {"chat_template": "config"}), {"": "config", "tools": "config"}),
        (model(tmp_path / "b", {"chat_template": both}), {"": "listed", "tools": "listed tools"}),
        (model(tmp_path / "c", {"chat_template": "config"}, default="file"), {"": "file", "tools": "file"}),
        (model(tmp_path / "d", {"chat_template": both}, default="file"), {"": "file", "tools": "file"}),
        (model(tmp_path / "e", default="file", tool_use="more", rag="r"), {"": "file", "tools": "more", "rag": "r"}),
        (model(tmp_path / "f", {"chat_template": "config"}, rag="r"), {"": None, "tools": None, "rag": "r"}),
        (model(tmp_path / "g", {"chat_template": both[1:]}), {"": None, "tools": "listed tools"}),
        (model(tmp_path / "h"), {"": None, "tools": None, "rag": "rag"}),
    ]
    for directory, want in cases:
        templates, tokenizer = ChatTemplates.of(directory), AutoTokenizer.from_pretrained(directory)
        for asked, text in want.items():
            options = {"tools": TOOLS} if asked == "tools" else {"chat_template": asked or None}
            assert ours(templates, CHATS["one"], **options) == text, (directory.name, asked)
            assert theirs(tokenizer, CHATS["one"], **options) == text, (directory.name, asked)
    with pytest.raises(ChatTemplateError, match=r"the model has no chat template; give one as chat_template="):
        ChatTemplates.of(tmp_path / "h").render(CHATS["one"])
    with pytest.raises(ChatTemplateError, match="chat templates rag, none of them 'default': name one"):
        ChatTemplates.of(tmp_path / "f").render(CHATS["one"])


def test_special_tokens_are_variables(tmp_path: Path) -> None:
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "image_token", "chat_token", "sep_token")
    source = "|".join(f"{{{{ {name} | default('none') }}}}" for name in names)
    added = {"content": "<pad>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    decoder = {"2": {**added, "content": "</s>", "special": True}}
    more = {"image_token": "<img>", "extra_special_tokens": {"chat_token": "<chat>"}, "sep_token": None}
    for i, config in enumerate((
        {}, {"pad_token": {"__type": "AddedToken", **added}}, more, {**more, "added_tokens_decoder": decoder},
        {"added_tokens_decoder": decoder},
    )):  # fmt: skip
        directory = model(tmp_path / str(i), {**config, "chat_template": source})
        if i in (0, 4):  # read only where the configuration is of the old kind
            write_json(directory / "special_tokens_map.json", {"pad_token": added, "sep_token": "<sep>"})
        want = theirs(AutoTokenizer.from_pretrained(directory), CHATS["one"])
        assert ours(ChatTemplates.of(directory), CHATS["one"]) == want is not None, config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "a JSON object is needed, not list"), ("{", "not readable as JSON"),
        ('{"chat_template": 3}', "chat_template: must be a text, or a list"),
        ('{"chat_template": [{"name": "a"}]}', "chat_template: must be a text, or a list"),
        ('{"chat_template": [{"name": "a", "template": null}]}', "chat_template: must be a text, or a list"),
    ],
)  # fmt: skip
def test_malformed_files_are_named(config: str, message: str, tmp_path: Path) -> None:
    (tmp_path / FILES).write_text(config)
    with pytest.raises(ChatTemplateError, match=f"{FILES}.*{message}"):
        ChatTemplates.of(tmp_path)
    (tmp_path / FILES).unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja: not readable as text"):
        ChatTemplates.of(tmp_path)


def test_messages_are_plain_values(plain: tuple[ChatTemplates, Any]) -> None:
    class Role(str, enum.Enum):
        USER = "user"

    @dataclasses.dataclass
    class Message:
        role: str
        content: str | None

    class Model:
        def model_dump(self) -> dict[str, Any]:
            return {"role": "user", "content": "dumped"}

    templates, tokenizer = plain
    chatml = TEMPLATES["chatml"]
    rich = [{"role": Role.USER, "content": "enum"}, Model()]
    text = templates.render(rich, chat_template=chatml)  # type: ignore[list-item]
    assert "<|im_start|>user\nenum" in text and "dumped" in text
    text = templates.render([Message("user", "field")], chat_template=chatml)  # type: ignore[list-item]
    assert text == theirs(tokenizer, [{"role": "user", "content": "field"}], chat_template=chatml)
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    for messages, message in (
        ("hello", "messages is a str"), ({"role": "user"}, "messages is a dict"), ([], "messages: empty"),
        (["hello"], r"messages\[0\] is a str: must be a mapping"), ([[]], r"messages\[0\] is a list"),
        ([{"role": object()}], r"messages\[0\]\['role'\] is a object: must be a plain value"),
        ([{"content": [{"image": b""}]}], r"messages\[0\]\['content'\]\[0\]\['image'\] is a bytes"),
        ([{"content": deep}], "deeper than 64 levels"),
    ):  # fmt: skip
        with pytest.raises(ChatTemplateError, match=message):
            templates.render(messages, chat_template=chatml)  # type: ignore[arg-type]
    with pytest.raises(ChatTemplateError, match=r"tools\[0\] is a int: must be a JSON schema, or a function"):
        templates.render(CHATS["one"], chat_template=chatml, tools=[3])
    for name in ("messages", "tools", "add_generation_prompt", "chat_template", "continue_final_message"):
        with pytest.raises(ChatTemplateError, match=f"'{name}' is an argument of its own"):
            templates.render(CHATS["one"], chat_template=chatml, chat_template_kwargs={name: "x"})
    for options, message in (
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: must be a mapping"), ({"tools": 3}, "tools is a int"),
        ({"tools": "weather"}, "tools is a str: must be a list"), ({"tools": TOOLS[0]}, "tools is a dict"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt = 'no': must be a bool"),
        ({"continue_final_message": 3, "add_generation_prompt": False}, "continue_final_message = 3: must be a bool"),
        ({"continue_final_message": "", "add_generation_prompt": False}, "continue_final_message = ''"),
        ({"chat_template_kwargs": {"documents": [{"title": "t"}, "x"]}}, r"\['documents'\]\[1\] is a str: must be"),
    ):  # fmt: skip
        with pytest.raises(ChatTemplateError, match=message):
            templates.render(CHATS["one"], chat_template=chatml, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["5", None, True, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["seconds", "characters", "memory"])
def test_limits_are_numbers(name: str, value: Any) -> None:
    """A limit that is no number would bound nothing."""
    with pytest.raises(ConfigError, match=rf"RenderLimits\.{name} = {value!r}: must be an? "):
        RenderLimits(**{name: value})


def test_functions_become_schemas(plain: tuple[ChatTemplates, Any]) -> None:
    def add(a: int, b: int) -> int:
        """Sum of two numbers.

        Args:
            a: one
            b: other
        """
        return a + b

    templates, tokenizer = plain
    options: dict[str, Any] = {"chat_template": "{{ tools | tojson }}", "tools": [add]}
    assert ours(templates, CHATS["one"], **options) == theirs(tokenizer, CHATS["one"], **options)
    with pytest.raises(ChatTemplateError, match=r"tools\[0\]: no schema can be made of it"):
        templates.render(CHATS["one"], chat_template="x", tools=[lambda a: a])


ERRORS = [
    ("{% if %}", "line 1: Expected an expression"), ("a\n{% for %}", "line 2: "),
    ("{{ raise_exception('roles must alternate') }}", "chat template: roles must alternate"),
    ("{{ messages.x.y }}", "no attribute 'x'"), ("{{ 1 / 0 }}", "division by zero"), ("{{ 'a' + 1 }}", "can only"),
    ("{{ x | nothing }}", "No filter named 'nothing'"), ("{% generation %}", "line 1"),
    ("{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}", "'break' outside loop"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"), ("{% include 'x' %}", "chat template"),
    ("{{ messages.append(1) }}", "is not safely callable|unsafe"),
    ("{{ messages.__class__.__mro__ }}", "unsafe|no attribute"), ("{% set ns = namespace(_x=1) %}", "underscore"),
    ("{% set ns = namespace() %}{% set ns._x = 1 %}", "underscore"), ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    ("{{ dict.__subclasses__() }}", "no attribute '__subclasses__'"), ("{{ range(999999999) }}", "Range too big"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "message"), ERRORS)
def test_what_a_template_may_not_do(source: str, message: str, plain: tuple[ChatTemplates, Any]) -> None:
    with pytest.raises(ChatTemplateError, match=f"(?i){message}"):
        plain[0].render(CHATS["one"], chat_template=source)


ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f(n) %}{% if n %}{{ caller(n) }}{% endif %}{% endmacro %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% call(n) f(1) %}{% endcall %}{% endfor %}{% endfor %}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_time_is_bounded(source: str, plain: tuple[ChatTemplates, Any]) -> None:
    started = time.monotonic()
    with pytest.raises(ChatLimitError, match=r"not done after 0\.2 seconds"):
        plain[0].render(CHATS["one"], chat_template=source, limits=RenderLimits(seconds=0.2))
    assert time.monotonic() - started < 10


def test_size_is_bounded(plain: tuple[ChatTemplates, Any]) -> None:
    limits = RenderLimits(characters=1000)
    with pytest.raises(ChatLimitError, match="wrote 1010 characters; at most 1000"):
        plain[0].render(CHATS["one"], chat_template="{% for i in range(999) %}0123456789{% endfor %}", limits=limits)
    with pytest.raises(ChatLimitError, match="at most 1048576"):
        plain[0].render(CHATS["one"], chat_template="x" * (1 << 20) + "x")


def test_threads_render_at_once(plain: tuple[ChatTemplates, Any]) -> None:
    """Each thread has a clock of its own."""
    templates, found = plain[0], []

    def work(i: int) -> None:
        for _ in range(20):
            found.append(templates.render([{"role": "user", "content": str(i)}], chat_template=TEMPLATES["chatml"]))
        with pytest.raises(ChatLimitError):
            templates.render(CHATS["one"], chat_template=ENDLESS[0], limits=RenderLimits(seconds=0.05 * i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 160 and len(set(found)) == 8


# -- templates of strangers -----------------------------------------------------------------------------------------


def test_apart_gives_the_same_text(plain: tuple[ChatTemplates, Any]) -> None:
    templates, _ = plain
    for name in ("tools", "variables", "generation"):
        options: dict[str, Any] = {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": True}}
        want = templates.render(CHATS["turns"], chat_template=TEMPLATES[name], **options)
        assert apart(templates, CHATS["turns"], chat_template=TEMPLATES[name], **options) == want
    for source, message in ERRORS[:4]:
        with pytest.raises(ChatTemplateError, match=message):
            apart(templates, CHATS["one"], chat_template=source)
    with pytest.raises(ChatTemplateError, match="must be a template"):
        apart(templates, CHATS["one"], chat_template=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "source",
    [
        ENDLESS[0], "{{ 'a' * 10000000000 }}", "{{ 9 ** (9 ** 9) }}", "{{ '%9999999999d' % 1 }}",
        "{{ lipsum(n=99999) }}",
        "{% set ns = namespace(x='a' * 99) %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% for i in range(9999) %}{{ 'a' * 99999 }}{% endfor %}", "{{ [[1] * 99999] * 99999 | tojson }}",
    ],
)  # fmt: skip
def test_a_bomb_ends_apart(source: str, plain: tuple[ChatTemplates, Any]) -> None:
    limits = RenderLimits(seconds=1.0, characters=1 << 20, memory=256 << 20)
    started = time.monotonic()
    with pytest.raises(ChatTemplateError):
        apart(plain[0], CHATS["one"], chat_template=source, limits=limits)
    assert time.monotonic() - started < 30


def test_apart_has_no_environment_of_ours(plain: tuple[ChatTemplates, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "x")
    seen: dict[str, Any] = {}
    import subprocess

    run = subprocess.run

    def spy(*args: Any, **options: Any) -> Any:
        seen.update(options)
        return run(*args, **options)

    monkeypatch.setattr(subprocess, "run", spy)
    apart(plain[0], CHATS["one"], chat_template="x")
    assert "SECRET_OF_THE_SERVER" not in seen["env"] and seen["cwd"] == "/"
    assert json.loads(seen["input"])["messages"] == CHATS["one"]
