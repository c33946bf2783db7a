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
    """One of three."""

    RED = "red"
    GREEN = "green"
    BLUE = "blue"


class Point(BaseModel):
    """Small enough that any model ends it: it may have no further properties."""

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


def tools_are_served() -> bool:
    """Whether this server knows tools; one without them says so."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    messages = [{"role": "user", "content": "x"}]
    try:
        openai.OpenAI(base_url=BASE_URL).chat.completions.create(
            model=MODEL, messages=messages, tools=[tool], max_tokens=1
        )
    except openai.BadRequestError as error:
        same((error.param, "not supported yet" in error.message), ("tools", True), error.message)
        return False
    return True


def main() -> None:
    """By a schema; and by a tool call, where the server has tools."""
    print(f"instructor {version('instructor')}")
    points(instructor.Mode.JSON_SCHEMA)
    if tools_are_served():
        points(instructor.Mode.TOOLS)
    else:
        print("tools are not served: that mode is left out")


if __name__ == "__main__":
    main()
