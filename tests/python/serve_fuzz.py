"""Seeded nonsense for an HTTP server: bodies that are nearly right, and requests that are nearly HTTP."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

COMPLETION: dict[str, Any] = {
    "model": "tiny", "prompt": "abc", "max_tokens": 3, "temperature": 0.5, "seed": 3, "stop": ["q"], "n": 1,
    "logprobs": 1, "logit_bias": {"5": 1.0}, "stream": False, "stream_options": None, "echo": False, "user": "u",
}  # fmt: skip
CHAT: dict[str, Any] = {
    "model": "tiny", "max_completion_tokens": 3, "temperature": 0.0, "top_p": 0.9, "logprobs": True, "top_logprobs": 2,
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
        {"role": "user", "content": "more"},
    ],
    "response_format": {"type": "text"}, "tools": [{"type": "function", "function": {
        "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}, "strict": False}}],
    "tool_choice": "none", "metadata": {"a": "b"},
}  # fmt: skip
RESPONSE: dict[str, Any] = {
    "model": "tiny", "instructions": "s", "max_output_tokens": 3, "temperature": 0.0, "metadata": {"a": "b"},
    "input": [
        {"role": "developer", "content": "s"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
    ],
    "text": {"format": {"type": "text"}}, "reasoning": {"summary": "auto"}, "truncation": "auto", "tool_choice": "none",
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}],
    "include": ["message.output_text.logprobs"], "top_logprobs": 2, "store": False,
}  # fmt: skip
TOKENIZE: dict[str, Any] = {"model": "tiny", "prompt": "abc", "add_special_tokens": True}
DETOKENIZE: dict[str, Any] = {"model": "tiny", "tokens": [1, 2, 3]}
BODIES = [
    ("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSE),
    ("/v1/responses/input_tokens", RESPONSE), ("/tokenize", TOKENIZE), ("/detokenize", DETOKENIZE),
]  # fmt: skip
FIELDS = sorted({
    *COMPLETION, *CHAT, *RESPONSE, "previous_response_id", "conversation", "background",
    "best_of", "suffix", "frequency_penalty", "presence_penalty", "repetition_penalty", "top_k",
    "min_p",
    "min_tokens", "ignore_eos", "bad_words", "allowed_token_ids", "stop_token_ids", "prompt_logprobs", "max_tokens",
    "truncate_prompt_tokens", "priority", "skip_special_tokens", "include_stop_str_in_output", "prediction",
    "speculative",
    "return_token_ids", "return_spec_stats", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "functions",
    "function_call", "parallel_tool_calls", "reasoning_effort", "modalities", "audio", "store", "service_tier",
    "documents",
    "continue_final_message", "guided_json", "structured_outputs", "logit_bias", "echo", "cache_salt", "request_id",
    "verbosity", "web_search_options", "prompt_embeds", "tokens", "add_special_tokens", "__class__", "self",
    "kwargs", "",
})  # fmt: skip


class Raw:
    """Text that stands in JSON as it is, whether or not it may."""

    def __init__(self, text: str) -> None:
        self.text = text


def odd(rng: random.Random, depth: int = 0) -> Any:
    """A value that somebody's check forgot."""
    simple: list[Any] = [
        None, True, False, 0, -1, 1, 2, 3.5, -0.0, 1e308, 1e-320, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 2**70,
        "", " ",
        "0", "-1", "1e5", "null", "a", "a" * 3000, "\x00", "é", "\U0001f600", "\u202e", "../../etc/passwd", "${x}",
        "{{7*7}}",
        Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1" * 5000), Raw("1e999"), Raw('"\\ud800"'), Raw("1.0"),
        Raw("-0"), Raw("1E+2"), Raw('"\\u0000"'), Raw("[" * 200 + "]" * 200), Raw('{"a":' * 120 + "1" + "}" * 120),
        [], {}, [[]], [{}], {"": ""}, [None], [True], ["a", 1], [1, 2, 3], [-1], [2**40], {"type": "text"}, {"a": [1]},
        {"type": "json_object"}, {"type": "json_schema"}, {"type": "function", "function": {"name": "f"}}, [0] * 2000,
        {str(i): i for i in range(50)}, {"1": -100, "2": None}, [""] * 40,
    ]  # fmt: skip
    value = rng.choice(simple)
    if depth < 3 and rng.random() < 0.1:
        return [odd(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    if depth < 3 and rng.random() < 0.1:
        return {rng.choice(["type", "text", "a", "name", "", "content"]): odd(rng, depth + 1) for _ in range(3)}
    return value


def encode(value: Any) -> str:
    """Return a value as JSON, with `Raw` as it is."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{encode(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(encode, value)) + "]"
    return json.dumps(value)


def body(rng: random.Random) -> tuple[str, bytes]:
    """A path, and a body that was right before a few things happened to it."""
    path, base = rng.choice(BODIES)
    value = json.loads(json.dumps(base))
    for _ in range(rng.randint(0, 3)):
        how = rng.random()
        if how < 0.45:
            value[rng.choice(FIELDS)] = odd(rng)
        elif how < 0.55 and value:
            del value[rng.choice(list(value))]
        else:
            damaged(rng, value)
    # Requests that run are short: the fuzz is of the server, not of the model.
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of"):
        if isinstance(value.get(name), (int, float)) and not isinstance(value[name], bool) and 4 < value[name] < 2**40:
            value[name] = 4
    text = encode(value)
    if rng.random() < 0.05 and text.startswith("{"):
        text = '{"model":"tiny",' + text[1:]  # a key twice
    raw = text.encode()
    how = rng.random()
    if how < 0.04:
        raw = raw[: rng.randrange(len(raw))]
    elif how < 0.10:
        some = bytearray(raw)
        for _ in range(rng.randint(1, 4)):
            some[rng.randrange(len(some))] = rng.randrange(256)
        raw = bytes(some)
    elif how < 0.12:
        raw = rng.choice(
            [b"\xef\xbb\xbf" + raw, text.encode("utf-16"), raw + raw, raw + b"\x00", b" " * 5000 + raw, b"[" * 9000]
        )
    return path, raw


def damaged(rng: random.Random, value: Any) -> None:
    """Some value within, at any depth, becomes another."""
    places: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        one = stack.pop()
        for key in one if isinstance(one, dict) else range(len(one)):
            places.append((one, key))
            if isinstance(one[key], (dict, list)):
                stack.append(one[key])
    if places:
        where, key = rng.choice(places)
        where[key] = odd(rng)


METHODS = [
    "GET",
    "POST",
    "HEAD",
    "OPTIONS",
    "PUT",
    "DELETE",
    "PATCH",
    "TRACE",
    "CONNECT",
    "get",
    "X",
    "",
    "PO ST",
    "\x00",
]
PATHS = [
    "/", "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/tiny", "/v1/models/%00",
    "/v1/models/..%2f..",
    "/health", "/ready", "/metrics", "/version", "/tokenize", "/v1", "/v1/", "//", "/..", "/../../etc/passwd",
    "/%ff%fe",
    "/%", "/v1/completions?x=1", "/v1/completions#x", "*", "", "http://other/v1/models", "/" + "a" * 9000, "/é",
    "/\x01",
    "/v1/completions/", "/metrics?name[]=x", "/docs", "/openapi.json", "/static/../app.py", "/favicon.ico",
]  # fmt: skip
VERSIONS = ["HTTP/1.1"] * 12 + ["HTTP/1.0", "HTTP/2.0", "HTTP/0.9", "HTTP/9.9", "HTTPS/1.1", "", "http/1.1"]
HEADERS = [
    "Host: localhost", "Host:", "Host: a\r\nHost: b", "Host: evil.example", "Host: [::1",
    "Content-Type: application/json",
    "Content-Type: text/plain", "Content-Type: application/x-www-form-urlencoded", "Content-Type:", "Content-Length: 3",
    "Content-Length: -1", "Content-Length: +3", "Content-Length: 0x3", "Content-Length: 99999999999999999999",
    "Content-Length: 3\r\nContent-Length: 4", "Content-Length: 3, 3", "Content-Length: ", "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip", "Transfer-Encoding: chunked, identity", "Transfer-Encoding: xchunked",
    "Connection: close",
    "Connection: keep-alive, Upgrade", "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Upgrade: h2c", "Expect: 100-continue", "Expect: x", "Accept: */*",
    "Accept-Encoding: gzip, br, \x01", "Authorization: Bearer", "Authorization: Bearer \xff\xfe",
    "Authorization: Basic eA==",
    "Authorization: Bearer " + "k" * 5000, "X-Request-Id: " + "i" * 5000, "X-Request-Id: \x7f", "X-Request-Id: a\tb",
    "X-Request-Id: ", "Origin: null", "Origin: http://evil.example", "Access-Control-Request-Method: POST",
    "X-Forwarded-For: 127.0.0.1, x", "Cookie: a=b; \xe9", "Range: bytes=0-", "If-None-Match: *", "no colon here",
    ": empty",
    " folded", "X: a\r\n b", "X\x00Y: z", "X: a\x00b", "X: a\rb", "É: x", "A" * 70000 + ": b", "B: " + "c" * 70000,
    "\r\n".join(f"H{i}: v" for i in range(300)), "Date: x", "Traceparent: 00-x", "Content-Encoding: gzip",
]  # fmt: skip
TAILS = [b"", b"{}", b'{"prompt":"a","max_tokens":1}', b"3\r\nabc\r\n0\r\n\r\n", b"zz\r\n", b"ffffffffffffffff\r\nabc",
         b"-1\r\n", b"3\r\nabcdef", b"0\r\nX: y\r\n\r\n", b"\x00" * 100,
         b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3]  # fmt: skip


def request(rng: random.Random) -> bytes:
    """The bytes of something like a request."""
    how = rng.random()
    if how < 0.05:
        return rng.randbytes(rng.randint(1, 300))
    lines = [f"{rng.choice(METHODS)} {rng.choice(PATHS)} {rng.choice(VERSIONS)}"]
    if rng.random() < 0.8:
        lines.append("Host: localhost")
    lines += rng.choices(HEADERS, k=rng.randint(0, 6))
    end = rng.choice(["\r\n"] * 9 + ["\n", "\r"])
    raw = end.join([*lines, "", ""]).encode("latin-1", "replace") + rng.choice(TAILS)
    if how < 0.12:
        raw = raw[: rng.randrange(len(raw) + 1)]
    elif how < 0.17:
        some = bytearray(raw[:4000])
        for _ in range(rng.randint(1, 5)):
            some[rng.randrange(len(some))] = rng.randrange(256)
        raw = bytes(some)
    return raw


def together(names: list[str]) -> None:
    """Put the records of runs with other seeds into ``benches/results/serve_faults.json``, and remove them."""
    results = Path(__file__).resolve().parents[2] / "benches/results"
    first, *others = (json.loads((results / f"{name}.json").read_text()) for name in names)
    for other in others:
        if other["commit"] != first["commit"] or other["versions"] != first["versions"]:
            raise SystemExit("runs of different commits or versions")
        first["seeds"] += other["seeds"]
        first["cases"] += other["cases"]
        for kind, more in other["fuzz"].items():
            counts = first["fuzz"][kind]["statuses"]
            for status, count in more["statuses"].items():
                counts[status] = counts.get(status, 0) + count
            for key in more.keys() - {"statuses"}:
                first["fuzz"][kind][key] += more[key]
    for name in names:
        (results / f"{name}.json").unlink()
    (results / "serve_faults.json").write_text(json.dumps(first, indent=1) + "\n")


if __name__ == "__main__":
    together(sys.argv[1:])
