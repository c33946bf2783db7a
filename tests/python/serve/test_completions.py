"""`/v1/completions`: the tokens of `LLM.generate`, in every form in which they can be asked for."""

from __future__ import annotations

from typing import Any

import pytest

from serve_world import Running
from specrs import LLM, SamplingParams
from specrs.serve.reply import spec_stats
from specrs.serve.scores import Columns, Names

PATH = "/v1/completions"
PROMPT = "def fibonacci(n):"
WARM = {"temperature": 0.8, "top_p": 0.95, "seed": 7, "max_tokens": 24}


def generated(llm: LLM, prompt: Any = PROMPT, **options: Any) -> Any:
    # The server adds these to the model's own values, where a request leaves them out.
    options = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 16, **options}
    return llm.generate([prompt], SamplingParams(**options))[0]


@pytest.mark.parametrize("options", [{"temperature": 0, "max_tokens": 24}, WARM, {**WARM, "top_k": 5, "min_p": 0.1},
                                     {**WARM, "presence_penalty": 0.7, "frequency_penalty": 0.3},
                                     {**WARM, "repetition_penalty": 1.2, "speculative": False}])  # fmt: skip
def test_tokens_are_those_of_generate(web: Running, plain: LLM, options: dict[str, Any]) -> None:
    want = generated(plain, **options)
    found = web.complete(prompt=PROMPT, return_token_ids=True, **options)
    [choice] = found["choices"]
    assert choice["token_ids"] == want.token_ids and choice["text"] == want.text
    assert choice["prompt_token_ids"] == want.prompt_token_ids
    assert choice["finish_reason"] == str(want.finish_reason)
    assert found["usage"]["prompt_tokens"] == want.usage.prompt_tokens
    assert found["usage"]["completion_tokens"] == want.usage.completion_tokens == len(want.token_ids)
    assert found["usage"]["total_tokens"] == want.usage.total_tokens
    assert found["object"] == "text_completion" and found["id"].startswith("cmpl-")
    assert found["system_fingerprint"] == web.service.fingerprint


def test_a_stream_says_the_same_in_pieces(web: Running) -> None:
    whole = web.complete(prompt=PROMPT, return_token_ids=True, logprobs=2, **WARM)
    chunks = web.stream(PATH, prompt=PROMPT, return_token_ids=True, logprobs=2, **WARM,
                        stream_options={"include_usage": True, "continuous_usage_stats": True})  # fmt: skip
    [want] = whole["choices"]
    *pieces, last = chunks
    choices = [choice for chunk in pieces for choice in chunk["choices"]]
    assert "".join(c["text"] for c in choices) == want["text"]
    assert [t for c in choices for t in c["token_ids"]] == want["token_ids"]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + [want["finish_reason"]]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for c in choices if c["logprobs"] for one in c["logprobs"][name]] == want["logprobs"][name]
    assert last["choices"] == [] and _sizes(last) == _sizes(whole)
    counts = [chunk["usage"]["completion_tokens"] for chunk in pieces]
    assert counts == sorted(counts) and counts[-1] == len(want["token_ids"])
    assert {chunk["id"] for chunk in chunks} == {last["id"]}


def _sizes(reply: dict[str, Any]) -> dict[str, Any]:
    """Without details: whether the cache had the prompt, and what was drafted."""
    return {name: one for name, one in reply["usage"].items() if not name.endswith("_details")}


def test_usage_is_null_before_the_last_chunk_and_absent_where_nobody_asks(web: Running) -> None:
    *pieces, last = web.stream(PATH, prompt=PROMPT, max_tokens=3, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in pieces) and last["usage"]["completion_tokens"] == 3
    assert all("usage" not in chunk for chunk in web.stream(PATH, prompt=PROMPT, max_tokens=3))


def test_prompts_of_every_form(web: Running, plain: LLM) -> None:
    texts = ["import os", "class Stack:", "def f(x):"]
    ids = [plain.encode(one) for one in texts]
    options = {"temperature": 0, "max_tokens": 6}
    want = [out.text for out in plain.generate(texts, SamplingParams(**options))]
    for prompt, texts_ in ((texts, want), (ids, want), (texts[0], want[:1]), (ids[0], want[:1])):
        found = web.complete(prompt=prompt, **options)
        assert [c["text"] for c in found["choices"]] == texts_
        assert [c["index"] for c in found["choices"]] == list(range(len(texts_)))
    chunks = web.stream(PATH, prompt=ids, **options)
    for i, one in enumerate(want):
        assert "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == i) == one


def test_n_outputs_of_each_prompt(web: Running, plain: LLM) -> None:
    want = generated(plain, **WARM, n=3)
    found = web.complete(prompt=[PROMPT, "import"], n=3, return_spec_stats=True, **WARM)
    assert [c["text"] for c in found["choices"][:3]] == [out.text for out in want.outputs]
    assert len({c["text"] for c in found["choices"]}) > 3
    assert [c["index"] for c in found["choices"]] == list(range(6))
    assert found["usage"]["completion_tokens"] == 6 * 24
    stats = found["specrs"]
    assert stats["rounds"] > 0 and sum(stats["accepted_lengths"]) == stats["rounds"]
    chunks = web.stream(PATH, prompt=[PROMPT, "import"], n=3, return_spec_stats=True, **WARM)
    for i in range(6):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == i]
        assert "".join(c["text"] for c in mine) == found["choices"][i]["text"]
    assert chunks[-1]["specrs"]["rounds"] > 0


def test_best_of_gives_the_most_probable_ones(web: Running, plain: LLM) -> None:
    want = generated(plain, **WARM, n=5, logprobs=0)
    mean = {out.text: out.cumulative_logprob / len(out.token_ids) for out in want.outputs}
    found = web.complete(prompt=PROMPT, n=2, best_of=5, **WARM)
    assert [c["text"] for c in found["choices"]] == sorted(mean, key=lambda text: -mean[text])[:2]
    assert found["usage"]["completion_tokens"] == 5 * 24
    assert web.refused(PATH, prompt=PROMPT, n=3, best_of=2)["param"] == "best_of"
    assert web.refused(PATH, prompt=PROMPT, best_of=2, stream=True)["param"] == "best_of"
    web.complete(prompt=PROMPT, best_of=1, max_tokens=1)


def test_logprobs_of_what_tokens_are_drawn_from(web: Running, plain: LLM) -> None:
    asked = {"max_tokens": 9, "temperature": 0.9, "seed": 5, "top_k": 3, "logprobs": 4}
    raw, drawn = ({**asked, "logprobs_mode": mode} for mode in ("raw_logprobs", "processed_logprobs"))
    want = generated(plain, PROMPT, **drawn)
    choice = web.complete(prompt=PROMPT, **drawn)["choices"][0]
    assert choice["text"] == want.text
    due = [found[token].logprob for token, found in zip(want.token_ids, want.logprobs or (), strict=True)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(due)
    assert all(len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])
    own = web.complete(prompt=PROMPT, **raw)["choices"][0]["logprobs"]
    assert own == web.complete(prompt=PROMPT, **asked)["choices"][0]["logprobs"] != choice["logprobs"]


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_a_text(web: Running, plain: LLM, most: int, stream: bool) -> None:
    text = "import os\nimport sys\n"
    want = generated(plain, text, max_tokens=1, temperature=0, logprobs=1, prompt_logprobs=1)
    ids = want.prompt_token_ids
    body = {"prompt": [text, "x = 1"], "max_tokens": most, "echo": True, "logprobs": 1, "temperature": 0}
    if stream:
        pieces = [c for chunk in web.stream(PATH, **body) for c in chunk["choices"]]
        assert len(pieces) == 2
        choice = next(c for c in pieces if c["index"] == 0)
    else:
        found = web.complete(**body)
        choice = found["choices"][0]
        assert found["usage"]["completion_tokens"] == 2 * most
    scores = choice["logprobs"]
    assert choice["text"] == text + (want.text if most else "") and choice["finish_reason"] == "length"
    assert len(scores["tokens"]) == len(ids) + most
    assert scores["tokens"][0] == "<|endoftext|>" and "".join(scores["tokens"][1:]) == choice["text"]
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    known = [one[t].logprob for one, t in zip(want.prompt_logprobs[1:], ids[1:], strict=True)]
    assert scores["token_logprobs"][1 : len(ids)] == known
    for token, offset in zip(scores["tokens"][1:], scores["text_offset"][1:], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    # Evaluation harnesses ask by this whether the text is what greedy decoding writes.
    top = scores["top_logprobs"][1]
    assert max(top, key=top.get) and scores["tokens"][1] in top


def test_echo_of_text_and_of_tokens(web: Running, plain: LLM) -> None:
    want = generated(plain, max_tokens=5, temperature=0)
    for prompt in (PROMPT, plain.encode(PROMPT)):
        body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "echo": True}
        assert web.complete(**body)["choices"][0]["text"] == PROMPT + want.text
        chunks = web.stream(PATH, **body)
        assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == PROMPT + want.text


def test_nothing_is_generated_where_nothing_is_wanted(web: Running) -> None:
    [choice] = web.complete(prompt=PROMPT, max_tokens=0)["choices"]
    assert choice["text"] == "" and choice["finish_reason"] == "length"


def test_stops_span_tokens(web: Running, plain: LLM) -> None:
    text = generated(plain, temperature=0, max_tokens=60).text
    stop = text[20:26]
    [choice] = web.complete(prompt=PROMPT, temperature=0, max_tokens=60, stop=stop)["choices"]
    assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 60, "stop": ["", stop]}
    chunks = web.stream(PATH, **body, include_stop_str_in_output=True)
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == text[: text.index(stop)] + stop


def test_defaults_are_the_request_s_then_the_model_s_then_openai_s(web: Running, plain: LLM) -> None:
    assert plain.stated_sampling.temperature == 0.6 and plain.stated_sampling.max_tokens is None
    want = generated(plain, seed=3)
    [choice] = web.complete(prompt=PROMPT, seed=3, return_token_ids=True)["choices"]
    assert choice["token_ids"] == want.token_ids and len(want.token_ids) == 16
    [again] = web.complete(prompt=PROMPT, seed=3, top_k=-1, min_p=0, temperature=0.6)["choices"]
    assert again["text"] == choice["text"]


def test_negative_seeds_are_those_of_two_s_complement(web: Running) -> None:
    body = {"prompt": PROMPT, "temperature": 1.0, "max_tokens": 12}
    assert web.complete(**body, seed=-1)["choices"] == web.complete(**body, seed=2**64 - 1)["choices"]
    assert web.complete(**body, seed=-(2**63))["choices"] == web.complete(**body, seed=2**63)["choices"]


def test_predicted_outputs_change_no_token(web: Running, plain: LLM) -> None:
    text = generated(plain, temperature=0, max_tokens=40).text
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40}
    for content in (text, [{"type": "text", "text": text}], ""):
        found = web.complete(**body, prediction={"type": "content", "content": content}, return_spec_stats=True)
        assert found["choices"][0]["text"] == text


def test_truncated_prompts(web: Running, plain: LLM) -> None:
    ids = plain.encode(PROMPT) * 3
    [choice] = web.complete(prompt=ids, truncate_prompt_tokens=4, max_tokens=2, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == ids[-4:]
    long = plain.encode(PROMPT) * 200
    [choice] = web.complete(prompt=long, truncate_prompt_tokens=-1, max_tokens=2, return_token_ids=True)["choices"]
    assert len(choice["prompt_token_ids"]) == web.service.context - 2


def test_what_does_not_fit_the_context(web: Running) -> None:
    most = web.service.context
    for body in ({"prompt": [1] * most}, {"prompt": [1] * 10, "max_tokens": most - 9}, {"prompt": "x " * most * 40}):
        error = web.refused(PATH, **body)
        assert error["code"] == "context_length_exceeded"
        assert f" {most}" in error["message"] or "max_prompt_chars" in error["message"]
    web.complete(prompt=[1] * (most - 3), max_tokens=3)
    [choice] = web.complete(prompt=[1] * (most - 3))["choices"]  # no request asked for 16
    assert choice["finish_reason"] in ("length", "stop")


def test_tokens_by_id_and_prompt_scores(web: Running, plain: LLM) -> None:
    [choice] = web.complete(prompt=PROMPT, max_tokens=2, logprobs=1, return_tokens_as_token_ids=True,
                            return_token_ids=True, prompt_logprobs=0)["choices"]  # fmt: skip
    assert choice["logprobs"]["tokens"] == [f"token_id:{t}" for t in choice["token_ids"]]
    ids = plain.encode(PROMPT)
    assert choice["prompt_logprobs"][0] is None and list(choice["prompt_logprobs"][1]) == [str(ids[1])]
    assert web.refused(PATH, prompt=PROMPT, prompt_logprobs=1, stream=True)["param"] == "prompt_logprobs"


def test_offsets_behind_characters_that_break_off() -> None:
    """Tokens of one character begin together; what a broken one leaves is a character of the text, too."""
    spelled = [b"a", b"\xf0\x9f", b"\x98\x80", b"b", b"\xf0\x9f", b"'", b"\xe2", b"\xf0\x9f\x98\x80c", b"\xff", b"d"]
    columns = Columns(Names(), spelled.__getitem__, frozenset(), 0)
    found = [columns.of([i], [None])["text_offset"][0] for i in range(len(spelled))]
    text = b"".join(spelled).decode("utf-8", "replace")
    assert text == "a\U0001f600b\ufffd'\ufffd\U0001f600c\ufffdd"
    assert found == [0, 1, 1, 2, 3, 4, 5, 6, 8, 9] and found[-1] == text.index("d")


def test_no_token_left_is_the_request_s_fault(web: Running) -> None:
    word = web.service.decode([300], False)
    error = web.refused(PATH, prompt=PROMPT, allowed_token_ids=[300], bad_words=[word])
    assert error["code"] == "no_token_left"


def test_drafts_are_counted_by_what_became_of_them() -> None:
    with LLM(max_batch=2, max_context_len=256, tree=(2, 3, 6)) as llm:
        [out] = llm.generate([PROMPT], SamplingParams(max_tokens=40, temperature=0))
    assert out.drafting_rounds == out.rounds and out.proposed == 5 * out.rounds  # a tree has 6 nodes with its root
    kept = sum(n * count for n, count in enumerate(out.accepted_lengths))
    assert kept == len(out.token_ids) - 1 and sum(out.drafted) <= kept - out.rounds + 1
    stats = spec_stats([out, out])
    assert stats["draft_tokens"] == 2 * out.proposed and stats["draft_tokens_accepted"] == 2 * sum(out.drafted)
    assert stats["mean_accepted"] == pytest.approx(out.mean_accepted, abs=1e-4)
