"""Chat templates that write tool calls as families of models do, in our own words; a model whose marks are tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specrs import assets

_HEAD = """{% if tools %}[tools]{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{% endif %}{% for m in messages %}<{{ m.role }}{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}>\
{{ m.content or "" }}"""
_TAIL = """
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""

HERMES = (
    _HEAD
    + """{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}"""
    + _TAIL
)
LLAMA3 = (
    _HEAD
    + """{% for c in m.tool_calls or [] %}<|python_tag|>{"name": "{{ c.function.name }}", \
"parameters": {{ c.function.arguments | tojson }}}{% endfor %}"""
    + _TAIL
)
MISTRAL = (
    _HEAD
    + """{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", \
"arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}\
{% if c.id | length != 9 %}{{ raise_exception("an id has 9 letters") }}{% endif %}{% endfor %}]{% endif %}"""
    + _TAIL
)
NEWER = (
    _HEAD
    + """{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]\
{{ c.function.arguments | tojson }}{% endfor %}"""
    + _TAIL
)
THINKING = HERMES.replace(
    "{% if add_generation_prompt %}<assistant>",
    "{# reasoning: <think></think> #}{% if add_generation_prompt %}<assistant>"
    "{% if thinks is defined %}{{ '<think>\n' if thinks else '<think>\n\n</think>\n\n' }}{% endif %}",
)
TEMPLATES = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "newer": NEWER}
MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")


def marked_model(folder: Path) -> tuple[Path, dict[str, int]]:
    """The model in the package, whose last tokens are the marks, and special; and their ids."""
    model = folder / "marked"
    model.mkdir()
    for path in assets.model_dir().iterdir():
        if path.name != "tokenizer.json":
            (model / path.name).symlink_to(path)
    tokenizer: dict[str, Any] = json.loads((assets.model_dir() / "tokenizer.json").read_text(encoding="utf-8"))
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    last = sorted(vocab, key=lambda token: vocab[token])[-len(MARKS) :]
    ids = {}
    for mark, token in zip(MARKS, last, strict=True):
        ids[mark] = vocab.pop(token)
        merges = tokenizer["model"]["merges"]
        tokenizer["model"]["merges"] = [
            m for m in merges if ("".join(m) if isinstance(m, list) else m.replace(" ", "")) != token
        ]
        tokenizer["added_tokens"].append({
            "id": ids[mark], "content": mark, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        })  # fmt: skip
        vocab[mark] = ids[mark]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return model, ids
