"""Writes what clients must get, by `LLM` itself: ``python expect.py FOLDER`` makes FOLDER/model and FOLDER/draft, which
are served, and FOLDER/expect.json, completions and conversations with their outputs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benches"))
from serve_cases import CHAT_TEMPLATE
from specrs import LLM, SamplingParams, assets

#: The benchmarks' template, with tools, which are called as Hermes calls them.
TEMPLATE = (
    """{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>{"name": ..., "arguments": {...}}</tool_call>
{% endif %}"""
    + CHAT_TEMPLATE
)
GREEDY = {"temperature": 0.0, "max_tokens": 24}
SEEDED = {"temperature": 0.8, "top_p": 0.95, "seed": 7, "max_tokens": 24}
PROMPTS = ["def quicksort(items):", "class Stack:\n", "import os\n\ndef walk(path):\n"]
CHATS = [
    [{"role": "user", "content": "sort a list of numbers"}],
    [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "read a file, line by line"}],
]


def entry(prompt: Any, params: dict[str, Any], output: Any) -> dict[str, Any]:
    """A request and its outputs, for a client of any library."""
    return {
        "prompt": prompt,
        "params": params,
        "texts": [o.text for o in output.outputs],
        "finish": [str(o.finish_reason) for o in output.outputs],
        "token_ids": [o.token_ids for o in output.outputs],
        "prompt_tokens": output.usage.prompt_tokens,
        "completion_tokens": sum(o.usage.completion_tokens for o in output.outputs),
    }


def main() -> None:
    """Write the folder."""
    work = Path(sys.argv[1])
    model = work / "model"
    model.mkdir(parents=True)
    for path in assets.model_dir().iterdir():
        (model / path.name).symlink_to(path)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (work / "draft").symlink_to(assets.draft_dir())
    with LLM(model, work / "draft") as llm:
        found: dict[str, Any] = {"completions": [], "chats": []}
        for params in (GREEDY, SEEDED, {**SEEDED, "n": 3, "stop": ["\n"]}):
            sampling = SamplingParams.from_dict(params)
            for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, sampling), strict=True):
                found["completions"].append(entry(prompt, params, output))
            for messages, output in zip(CHATS, llm.chat(CHATS, sampling), strict=True):
                found["chats"].append(entry(messages, params, output))
    (work / "expect.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
