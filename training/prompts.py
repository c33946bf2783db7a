"""Writes prompts of two kinds for a trial of `specrs train-head` with a chat model: explanations, and stories.

python -m training.prompts > prompts.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pydoc_data.topics import topics

EACH = 90


def prompts() -> Iterator[tuple[str, str]]:
    """Kind and text of each prompt."""
    for topic in sorted(topics)[:EACH]:
        yield "explain", f"Explain {topic} in Python to a beginner, with an example."
    for module in sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))[:EACH]:
        yield "write", f"Write a short story in which somebody is called {module.capitalize()}."


if __name__ == "__main__":
    for kind, text in prompts():
        print(json.dumps({"kind": kind, "messages": [{"role": "user", "content": text}]}))
