"""`instructor`: models of pydantic out of answers, by a schema and by a tool call."""

from __future__ import annotations

from enum import Enum
from importlib.metadata import version
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

from common import BASE_URL, MODEL, same


class Colour(str, Enum):
    """A colour, one of three."""

    RED = "red"
    GREEN = "green"
    BLUE = "blue"


class Point(BaseModel):
    """A point, small enough that any model ends it: it may have no further properties."""

    model_config = ConfigDict(extra="forbid")

    colour: Colour
    visible: bool
    size: Literal[1, 2, 3]
    name: str = Field(max_length=8, pattern="^[a-z]{1,8}$")


def points(mode: instructor.Mode) -> None:
    """A seed gives one point, again and again."""
    client = instructor.from_openai(openai.OpenAI(base_url=BASE_URL, max_retries=0, timeout=120), mode=mode)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "describe a point"}], "response_model": Point}
    found = [
        client.chat.completions.create(**asked, max_retries=0, seed=seed, max_tokens=400, temperature=1.0).model_dump()
        for seed in (1, 2, 1)
    ]
    same(found[0], found[2], f"{mode}: the seed's point")
    print(mode, found[:2])


def main() -> None:
    """Ask by a schema, and by a tool call."""
    print(f"instructor {version('instructor')}")
    points(instructor.Mode.JSON_SCHEMA)
    points(instructor.Mode.TOOLS)


if __name__ == "__main__":
    main()
