"""`langchain-openai`: invoke, stream, batch, and what a server of vLLM's kind is told through `extra_body`."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

from common import BASE_URL, EXPECT, MODEL, same

KINDS = {"user": HumanMessage, "system": SystemMessage}
GREEDY = {"temperature": 0.0, "max_tokens": 24}


def main() -> None:
    """All of it."""
    print(f"langchain-openai {version('langchain-openai')}")
    chats = [c for c in EXPECT["chats"] if c["params"] == GREEDY]
    asked = [[KINDS[m["role"]](m["content"]) for m in c["prompt"]] for c in chats]
    chat = ChatOpenAI(model=MODEL, base_url=BASE_URL, **GREEDY, max_retries=0)
    for messages, case in zip(asked, chats, strict=True):
        answer = chat.invoke(messages)
        same(isinstance(answer, AIMessage) and answer.content, case["texts"][0], "invoke")
        same(answer.usage_metadata["output_tokens"], case["completion_tokens"], "usage")
        same(answer.response_metadata["finish_reason"], case["finish"][0], "finish_reason")
        whole = None
        for piece in chat.stream(messages):
            whole = piece if whole is None else whole + piece
        same(whole.content, case["texts"][0], "stream")
    same([a.content for a in chat.batch(asked)], [c["texts"][0] for c in chats], "batch")
    found = asyncio.run(chat.abatch(asked * 8))
    same([a.content for a in found], [c["texts"][0] for c in chats] * 8, "abatch")

    def get_weather(city: str, days: int) -> str:
        """The weather of a city, for some days."""
        return f"{city}: sunny for {days} days"

    caller = ChatOpenAI(model=MODEL, base_url=BASE_URL, temperature=1.0, seed=3, max_tokens=300, max_retries=0)
    bound = caller.bind_tools([get_weather], tool_choice="get_weather", strict=True)
    [call] = bound.invoke(asked[0]).tool_calls
    same((call["name"], set(call["args"])), ("get_weather", {"city", "days"}), "a tool call")
    whole = None
    for piece in bound.stream(asked[0]):
        whole = piece if whole is None else whole + piece
    same([(c["name"], c["args"]) for c in whole.tool_calls], [(call["name"], call["args"])], "a streamed tool call")

    cases = [c for c in EXPECT["completions"] if c["params"] == GREEDY]
    text = OpenAI(model=MODEL, base_url=BASE_URL, **GREEDY, max_retries=0)
    for case in cases:
        same(text.invoke(case["prompt"]), case["texts"][0], "completion")
        same("".join(text.stream(case["prompt"])), case["texts"][0], "streamed completion")


if __name__ == "__main__":
    main()
