"""The `openai` client, of whatever version is installed: completions, conversations, streams, errors."""

from __future__ import annotations

import asyncio
import json

import openai

from common import BASE_URL, EXPECT, MODEL, raised, same

client = openai.OpenAI(base_url=BASE_URL, max_retries=0, timeout=120)
# Fields that are not OpenAI's own travel in `extra_body`, as with other servers.
EXTRA = {"return_token_ids": True}


def completions() -> None:
    """Whole and streamed, with the tokens and the text of `LLM.generate`."""
    for case in EXPECT["completions"]:
        whole = client.completions.create(model=MODEL, prompt=case["prompt"], **case["params"], extra_body=EXTRA)
        same([c.text for c in whole.choices], case["texts"], "text")
        same([c.finish_reason for c in whole.choices], case["finish"], "finish_reason")
        same([c.token_ids for c in whole.choices], case["token_ids"], "token_ids")
        same(whole.usage.prompt_tokens, case["prompt_tokens"], "prompt_tokens")
        same(whole.usage.completion_tokens, case["completion_tokens"], "completion_tokens")
        same(whole.system_fingerprint is not None, True, "system_fingerprint")
        texts, finish = [""] * len(case["texts"]), [None] * len(case["texts"])
        usage = None
        for chunk in client.completions.create(
            model=MODEL, prompt=case["prompt"], stream=True, stream_options={"include_usage": True}, **case["params"]
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                finish[choice.index] = choice.finish_reason or finish[choice.index]
        same(texts, case["texts"], "streamed text")
        same(finish, case["finish"], "streamed finish_reason")
        same(usage.completion_tokens, case["completion_tokens"], "streamed usage")
    several = [c for c in EXPECT["completions"] if c["params"] == EXPECT["completions"][0]["params"]]
    whole = client.completions.create(model=MODEL, prompt=[c["prompt"] for c in several], **several[0]["params"])
    same([c.text for c in whole.choices], [c["texts"][0] for c in several], "several prompts")


def conversations() -> None:
    """Whole, streamed, and by the helper that folds a stream."""
    for case in EXPECT["chats"]:
        whole = client.chat.completions.create(model=MODEL, messages=case["prompt"], **case["params"], extra_body=EXTRA)
        same([c.message.content for c in whole.choices], case["texts"], "content")
        same([c.message.role for c in whole.choices], ["assistant"] * len(case["texts"]), "role")
        same([c.finish_reason for c in whole.choices], case["finish"], "finish_reason")
        same([c.token_ids for c in whole.choices], case["token_ids"], "token_ids")
        texts, roles, last = [""] * len(case["texts"]), [None] * len(case["texts"]), None
        for chunk in client.chat.completions.create(
            model=MODEL, messages=case["prompt"], stream=True, stream_options={"include_usage": True}, **case["params"]
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles[choice.index] = roles[choice.index] or choice.delta.role
            same(last is None or last.usage is None, True, "only the last chunk has the usage")
            last = chunk
        same(texts, case["texts"], "streamed content")
        same(roles, ["assistant"] * len(roles), "streamed role")
        same((last.choices, last.usage.completion_tokens), ([], case["completion_tokens"]), "the chunk of the usage")
    # The helper that folds a stream gives a whole completion where no output was cut at `max_tokens`, else an error.
    case = next(c for c in EXPECT["chats"] if set(c["finish"]) == {"stop"})
    with client.chat.completions.stream(model=MODEL, messages=case["prompt"], **case["params"]) as stream:
        stream.until_done()
        folded = stream.get_final_completion()
    same([c.message.content for c in folded.choices], case["texts"], "the helper's texts")


def scores() -> None:
    """Log-probabilities in both forms, which agree."""
    case = EXPECT["chats"][0]
    old = client.completions.create(model=MODEL, prompt="def f(x):", max_tokens=6, temperature=0, logprobs=3).choices[0]
    same(len(old.logprobs.tokens), 6, "tokens")
    same("".join(old.logprobs.tokens), old.text, "tokens spell the text")
    same(all(p <= 0 for p in old.logprobs.token_logprobs), True, "log-probabilities")
    same([max(t.values()) for t in old.logprobs.top_logprobs], old.logprobs.token_logprobs, "greedy is the first")
    new = client.chat.completions.create(
        model=MODEL, messages=case["prompt"], max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    ).choices[0]
    same("".join(t.token for t in new.logprobs.content), new.message.content, "tokens spell the content")
    same(all(len(t.top_logprobs) == 3 for t in new.logprobs.content), True, "top_logprobs")
    same(all(t.top_logprobs[0].logprob == t.logprob for t in new.logprobs.content), True, "greedy is the first")


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 9}, "unit": {"enum": ["c", "f"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


def tools() -> None:
    """Calls by a grammar: whole, streamed, by the helper that folds a stream, and their results sent back."""
    messages = [{"role": "user", "content": "the weather?"}]
    asked = {"model": MODEL, "messages": messages, "tools": [WEATHER, NOW], "seed": 3, "max_tokens": 200}
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, finish in (("required", "tool_calls"), (named, "stop")):
        body = {**asked, "tool_choice": choice, "parallel_tool_calls": False}
        whole = client.chat.completions.create(**body).choices[0]
        same((whole.finish_reason, whole.message.content), (finish, None), "finish_reason and content")
        [call] = whole.message.tool_calls
        arguments = json.loads(call.function.arguments)
        if call.function.name == "get_weather":
            same((set(arguments), arguments["unit"] in "cf"), ({"city", "unit"}, True), "arguments")
        name, text, reason, ids = "", "", None, set()
        for chunk in client.chat.completions.create(**body, stream=True):
            piece = chunk.choices[0]
            reason = piece.finish_reason or reason
            for part in piece.delta.tool_calls or []:
                ids.add(part.id)
                name, text = name + (part.function.name or ""), text + (part.function.arguments or "")
        same((name, text, reason), (call.function.name, call.function.arguments, finish), "a streamed call")
        same(len(ids - {None, call.id}), 1, "an id of its own")
        with client.chat.completions.stream(**body) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
            folded = stream.get_final_completion().choices[0]
        same([event.arguments for event in done], [call.function.arguments], "the helper's events")
        same(folded.message.tool_calls[0].function.arguments, call.function.arguments, "the helper's call")
        same((folded.finish_reason, folded.message.content), (finish, None), "the helper's message")
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        more = {**asked, "messages": [*messages, whole.message.model_dump(exclude_none=True), result], "max_tokens": 4}
        same(client.chat.completions.create(**more).choices[0].finish_reason, "length", "the conversation goes on")
    error = raised(openai.BadRequestError, client.chat.completions.create, **asked, tool_choice="always")
    same(error.param, "tool_choice", "param")


def errors() -> None:
    """The classes and fields that programs catch."""
    error = raised(openai.BadRequestError, client.completions.create, model=MODEL, prompt="x", temperature=-1)
    same(error.param, "temperature", "param")
    error = raised(openai.NotFoundError, client.completions.create, model="nobody", prompt="x")
    same(error.code, "model_not_found", "code")
    long = [1] * 5000
    error = raised(openai.BadRequestError, client.completions.create, model=MODEL, prompt=long)
    same(error.code, "context_length_exceeded", "code")
    raised(openai.BadRequestError, client.chat.completions.create, model=MODEL, messages=[])
    raised(openai.NotFoundError, client.models.retrieve, "nobody")


def models() -> None:
    """Ask for the models that there are."""
    same([m.id for m in client.models.list()], [MODEL], "models")
    same(client.models.retrieve(MODEL).id, MODEL, "model")


async def at_once() -> None:
    """Run many at once, and cancel some; the rest get their own tokens."""
    case = EXPECT["completions"][0]
    async with openai.AsyncOpenAI(base_url=BASE_URL, max_retries=5, timeout=120) as busy:

        async def one(i: int) -> str:
            case = EXPECT["completions"][i % 3]
            done = await busy.completions.create(model=MODEL, prompt=case["prompt"], **case["params"])
            same(done.choices[0].text, case["texts"][0], "text of one of many")
            return done.id

        async def gone() -> None:
            endless = {"max_tokens": 900, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
            stream = await busy.completions.create(model=MODEL, prompt=case["prompt"], stream=True, **endless)
            async for _ in stream:
                await stream.close()
                return

        found = await asyncio.gather(*map(one, range(24)), *(gone() for _ in range(6)))
        ids = [i for i in found if i is not None]
        same(len(set(ids)), 24, "ids of their own")


if __name__ == "__main__":
    print(f"openai {openai.__version__}")
    models()
    completions()
    conversations()
    scores()
    tools()
    errors()
    asyncio.run(at_once())
