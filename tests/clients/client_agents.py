"""The `openai-agents` framework, whose default is the Responses API: agents that answer, call tools, hand over, and
give typed outputs, whole and streamed; and the `openai` client's own helpers for responses."""

from __future__ import annotations

import asyncio
import json
from importlib.metadata import version
from typing import Literal

import openai
from agents import (
    Agent,
    ItemHelpers,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import ModelBehaviorError
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel, Field

from common import BASE_URL, EXPECT, MODEL, raised, same

set_tracing_disabled(True)
plain = openai.OpenAI(base_url=BASE_URL, max_retries=0, timeout=120)
client = openai.AsyncOpenAI(base_url=BASE_URL, max_retries=0, timeout=120)
model = OpenAIResponsesModel(MODEL, openai_client=client)
asked: list[str] = []


class Weather(BaseModel):
    """An answer of a fixed form."""

    city: str = Field(max_length=9)
    unit: Literal["c", "f"]


@function_tool
def get_weather(unit: Literal["c", "f"]) -> str:
    """The weather here."""
    asked.append(unit)
    return f"12 degrees {unit}"


async def answers() -> None:
    """The text of `LLM.chat`, whole and streamed, up to a stop: an answer that is cut is an error to the framework."""
    for case in EXPECT["chats"]:
        params, text = case["params"], case["texts"][0]
        if params.get("n") is not None:
            continue
        stop = text[12:16]
        extra = {"stop": [stop], **({"seed": params["seed"]} if "seed" in params else {})}
        how = ModelSettings(temperature=params["temperature"], top_p=params.get("top_p"), extra_body=extra)
        *head, user = case["prompt"]
        agent = Agent(name="a", instructions=head[0]["content"] if head else None, model=model, model_settings=how)
        whole = await Runner.run(agent, user["content"])
        same(whole.final_output, text[: text.index(stop)], "text")
        result = Runner.run_streamed(agent, user["content"])
        streamed = ""
        async for event in result.stream_events():
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
                streamed += event.data.delta
        same((streamed, result.final_output), (whole.final_output,) * 2, "streamed text")


async def tools() -> None:
    """Call a tool that must be called; then get the answer to the call's result."""
    how = ModelSettings(temperature=0.0, max_tokens=60, tool_choice="get_weather", parallel_tool_calls=False)
    agent = Agent(name="a", instructions="Tell the weather.", model=model, tools=[get_weather], model_settings=how)
    for streamed in (False, True):
        asked.clear()
        # The tool's result is the end: what the small model would say to it may be anything.
        agent.tool_use_behavior = "stop_on_first_tool"
        if streamed:
            result = Runner.run_streamed(agent, "The weather?")
            names = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
            same(names, ["tool_called", "tool_output"], "events")
        else:
            result = await Runner.run(agent, "The weather?")
        same(result.final_output, f"12 degrees {asked[0]}", "the tool's result")
        same(len(asked), 1, "calls")
    # The conversation goes on with the call and its result.
    how = ModelSettings(temperature=0.0, tool_choice="none", extra_body={"stop": ["e"]})
    agent = agent.clone(model_settings=how)
    more = await Runner.run(agent, [*result.to_input_list(), {"role": "user", "content": "Thanks."}])
    same(isinstance(ItemHelpers.text_message_outputs(more.new_items), str), True, "goes on")


async def forms() -> None:
    """A typed output, by a schema."""
    how = ModelSettings(temperature=0.0, max_tokens=100)
    agent = Agent(name="a", model=model, output_type=Weather, model_settings=how)
    result = await Runner.run(agent, "The weather?")
    same(isinstance(result.final_output, Weather), True, "a typed output")


async def handoffs() -> None:
    """An agent that hands over to another, which answers."""
    last = Agent(name="last", model=model, model_settings=ModelSettings(temperature=0.0, extra_body={"stop": ["e"]}))
    how = ModelSettings(temperature=0.0, max_tokens=60, tool_choice="transfer_to_last", parallel_tool_calls=False)
    first = Agent(name="first", model=model, handoffs=[last], model_settings=how)
    result = await Runner.run(first, "Hello.")
    same(result.last_agent.name, "last", "who answers")


async def cut() -> None:
    """A stream that `max_tokens` cuts tells so."""
    how = ModelSettings(temperature=0.0, max_tokens=2)
    result = Runner.run_streamed(Agent(name="a", model=model, model_settings=how), "x")
    try:
        async for _ in result.stream_events():
            pass
    except ModelBehaviorError as error:
        same("max_output_tokens" in str(error), True, "why")
    else:
        raise SystemExit("a stream that is cut gave no error")


def helpers() -> None:
    """The `openai` client's own: `parse`, `stream`, `input_tokens`, and errors."""
    body = {"model": MODEL, "input": "The weather?", "temperature": 0}
    parsed = plain.responses.parse(**body, text_format=Weather, max_output_tokens=100)
    same(isinstance(parsed.output_parsed, Weather), True, "parsed")
    with plain.responses.stream(**body, text_format=Weather, max_output_tokens=100) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        folded = stream.get_final_response()
    same((text, folded.output_parsed), (parsed.output_text, parsed.output_parsed), "folded")
    schema = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"]}
    tool = {"type": "function", "name": "f", "parameters": {**schema, "additionalProperties": False}, "strict": True}
    more = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 100}
    [call] = plain.responses.create(**body, **more).output
    same(json.loads(call.arguments)["unit"] in ("c", "f"), True, "arguments")
    with plain.responses.stream(**body, **more) as stream:
        same(stream.get_final_response().output[0].arguments, call.arguments, "a folded call")
    done = plain.responses.create(**body, max_output_tokens=4)
    same((done.status, done.incomplete_details.reason), ("incomplete", "max_output_tokens"), "cut")
    counted = plain.responses.input_tokens.count(model=MODEL, input="The weather?")
    same(counted.input_tokens, done.usage.input_tokens, "input tokens")
    error = raised(openai.BadRequestError, plain.responses.create, **body, previous_response_id=done.id)
    same(error.param, "previous_response_id", "param")
    raised(openai.NotFoundError, plain.responses.retrieve, done.id)
    error = raised(openai.BadRequestError, plain.responses.create, **body, tools=[{"type": "web_search"}])
    same(error.param, "tools", "param")


async def main() -> None:
    """All of it."""
    for one in (answers, tools, forms, handoffs, cut):
        await one()
    await client.close()


if __name__ == "__main__":
    print(f"openai-agents {version('openai-agents')} with openai {openai.__version__}")
    helpers()
    asyncio.run(main())
