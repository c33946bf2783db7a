"""`instructor`: models of pydantic out of answers, by a schema and by a tool call."""

from __future__ import annotations

from enum import Enum
from importlib.metadata import version
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field

from common import BASE_URL, MODEL, same


class Colour(str, Enum):
    """One of three."""

    RED = "red"
    GREEN = "green"
    BLUE = "blue"


class Point(BaseModel):
    """Small enough that any model ends it."""

    colour: Colour
    visible: bool
    size: Literal[1, 2, 3]
    name: str = Field(max_length=8, pattern="^[a-z]{1,8}$")


def main() -> None:
    """Both modes; a seed, so that another run gives the same."""
    print(f"instructor {version('instructor')}")
    messages = [{"role": "user", "content": "describe a point"}]
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        client = instructor.from_openai(openai.OpenAI(base_url=BASE_URL, max_retries=0, timeout=120), mode=mode)
        found = [
            client.chat.completions.create(
                model=MODEL, messages=messages, response_model=Point, max_retries=0, seed=seed, max_tokens=200,
                temperature=1.0,
            )
            for seed in (1, 2, 1)
        ]  # fmt: skip
        same(found[0], found[2], f"{mode}: the seed's point")
        print(mode, found[:2])


if __name__ == "__main__":
    main()
