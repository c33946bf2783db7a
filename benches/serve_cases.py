"""Seeded requests for a server under load, and what must come of each: standard library alone.

Case ``i`` of a seed is the same in every process, so that the process that drives the server and the one that has the
engine need not talk. Its prompt and parameters are also what `LLM.generate` is asked for afterwards.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB = 8192  # vocabulary of the model in the package
MODEL = "load"  # the name that the server gives the model
HELDOUT = Path(__file__).parent.parent / "python/specrs/assets/heldout_prompts.json"

#: A chat template for the model in the package, which has none: what a conversation is to a model of Python source.
CHAT_TEMPLATE = """\
{%- for message in messages %}# {{ message['role'] }}: {{ message['content'] }}
{% endfor %}{% if add_generation_prompt %}def {% endif %}"""

#: Forms that some outputs have: `StructuredOutputs`, as requests say it.
FORMS: list[dict[str, Any]] = [
    {"regex": "[a-z_]{3,12}( = [0-9]{1,4})?"},
    {"choice": ["return", "raise ValueError", "pass"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
              "required": ["a", "b"], "additionalProperties": False}},
]  # fmt: skip

#: Behaviours of readers, with their numbers among a hundred.
FATES = {"read": 70, "slow": 8, "leave": 8, "leave at once": 4, "vanish": 3, "bad": 7}


@dataclass
class Case:
    """One request.

    Attributes:
        index: number among the seed's cases.
        path, body: path and body of the request; ``raw`` in place of a body that is no JSON.
        fate: behaviour of the reader, one of `FATES`. ``leave``: hangs up after ``patience`` chunks; ``leave at once``:
            once it has sent the request, before an answer is read; ``vanish``: within the request's body; ``bad``: a
            request to refuse.
        prompt: token ids, a text, or messages.
        params: fields of `SamplingParams`.
        status: status of the answer that is due.
        param: the parameter that the error of a bad request names, or begins with; ``None``: none in particular.
        pause: seconds before each read of a slow reader.
    """

    index: int
    path: str
    body: dict[str, Any]
    fate: str
    prompt: Any = None
    params: dict[str, Any] = field(default_factory=dict)
    status: int = 200
    param: str | None = None
    raw: bytes | None = None
    patience: int = 0
    pause: float = 0.0

    @property
    def chat(self) -> bool:
        """True if the case is a conversation."""
        return self.path.endswith("/chat/completions")

    def sent(self) -> bytes:
        """The body's bytes."""
        return self.raw if self.raw is not None else json.dumps(self.body).encode()


_TEXTS: list[str] = []


def texts() -> list[str]:
    """The held-out prompts of the package."""
    if not _TEXTS:
        _TEXTS.extend(entry["prompt"] for entry in json.loads(HELDOUT.read_text(encoding="utf-8")))
    return _TEXTS


def case(seed: int, index: int, most: int = 64, fates: dict[str, int] | None = None) -> Case:
    """Case ``index`` of ``seed``, with at most ``most`` tokens an output."""
    rng = random.Random(f"{seed} {index}")
    weights = FATES if fates is None else fates
    fate = rng.choices(list(weights), list(weights.values()))[0]
    if fate == "bad":
        return bad(rng, index)
    chat = rng.random() < 0.2
    params: dict[str, Any] = {
        "max_tokens": 1 + int(most * rng.random() ** 1.5 * 0.999),
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0, 1.3]),
        "top_p": rng.choice([1.0, 1.0, 0.9]),
        "top_k": rng.choice([0, 0, 40]),
        "seed": rng.getrandbits(62),
    }
    if rng.random() < 0.15:
        params["stop"] = rng.sample(["\n\n", "def ", "    return", "(self", "import"], rng.randint(1, 2))
    if rng.random() < 0.08:
        params["n"] = rng.randint(2, 3)
    if rng.random() < 0.08:
        params["presence_penalty"], params["frequency_penalty"] = rng.uniform(-1, 1), rng.uniform(-1, 1)
    if rng.random() < 0.05:
        params["min_tokens"] = rng.randint(0, params["max_tokens"])
    if rng.random() < 0.05:
        params["logit_bias"] = {str(rng.randrange(VOCAB)): rng.uniform(-5, 5) for _ in range(3)}
    if rng.random() < 0.1:
        params["speculative"] = False
    if rng.random() < 0.1 and not chat:
        params["logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.1:
        params["ignore_eos"] = True
    elif rng.random() < 0.06 and not {"logit_bias", "min_tokens"} & params.keys():  # may leave a form no token
        params["structured_outputs"] = rng.choice(FORMS)
    body: dict[str, Any] = {"model": MODEL, "return_token_ids": True, **params}
    text = rng.choice(texts())
    text = text[: rng.randint(20, min(240, len(text)))]
    prompt: Any
    if chat:
        prompt = [{"role": "user", "content": text[:120]}]
        if rng.random() < 0.3:
            prompt.insert(0, {"role": "system", "content": "Write Python."})
        body["messages"] = prompt
        body["max_completion_tokens"] = body.pop("max_tokens")
    else:
        prompt = text if rng.random() < 0.5 else [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 80))]
        body["prompt"] = prompt
    streams = rng.random() < 0.8
    if fate in ("slow", "leave"):
        streams = True
    if streams:
        body["stream"] = True
        if rng.random() < 0.7:
            body["stream_options"] = {"include_usage": True}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return Case(
        index, path, body, fate, prompt, params, patience=rng.randint(0, 4), pause=rng.choice([0.01, 0.05, 0.15])
    )


def plain(index: int, prompt: list[int], params: dict[str, Any]) -> Case:
    """A streaming completion of token ids, read to its end."""
    body = {"model": MODEL, "prompt": prompt, "stream": True, "return_token_ids": True, **params}
    return Case(index, "/v1/completions", body, "read", prompt, params)


def bad(rng: random.Random, index: int) -> Case:
    """A request that a server must refuse, with the status and the name of the field that the refusal owes."""
    body: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 4}
    kind = rng.randrange(14)
    status, param, raw, path = 400, None, None, "/v1/completions"
    if kind == 0:
        raw = rng.choice(
            [b"", b"{", b"[]", b"null", b'{"prompt": "x",}', b"\xff\xfe", b'"x"', b"{" * 2000, b"[" * 5000]
        )
    elif kind == 1:
        body["temperature"], param = rng.choice([-1, "hot", [], -1e-9, True]), "temperature"
    elif kind == 2:
        body["prompt"], param = rng.choice([{}, 7, True, [VOCAB], [-1], ["x", 3], [[]], [1.5]]), "prompt"
    elif kind == 3:
        body["model"], status, param = "nobody", 404, "model"
    elif kind == 4:
        body["n"], param = rng.choice([0, -1, "2", 1 << 40]), "n"
    elif kind == 5:
        body["max_tokens"], param = rng.choice([-1, -3, "many", 1.5]), "max_tokens"
    elif kind == 6:
        body["prompt"], param = [1] * 5000, "prompt"
    elif kind == 7:
        body["logit_bias"], param = rng.choice([{"x": 1}, {str(VOCAB): 1}, [1]]), "logit_bias"
    elif kind == 8:
        body = {"model": MODEL, "messages": rng.choice(["hello", [], [{"role": 3}], 7, [None]])}
        path, param = "/v1/chat/completions", "messages"
    elif kind == 9:
        body["stop"], param = rng.choice([5, [1], {}, ["x"] * 10000]), "stop"
    elif kind == 10:
        body["no_such_field"], param = 1, "no_such_field"
    elif kind == 11:
        path, status = "/v1/nothing", 404
    elif kind == 12:
        body["top_p"], param = rng.choice([0, 1.5, -1, "x"]), "top_p"
    else:
        del body["prompt"]
        param = "prompt"
    return Case(index, path, body, "bad", status=status, param=param, raw=raw)
