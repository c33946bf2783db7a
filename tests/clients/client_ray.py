"""`examples/ray_serve.py` against Ray itself: two replicas, both of which answer, with the tokens of `LLM`.

The server that `run.sh` started is not asked; the replicas here have the same model.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import httpx

from common import EXPECT, MODEL, same

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def streamed(client: httpx.Client, body: dict[str, object]) -> tuple[str, list[str]]:
    """The replica, and the text of each output."""
    texts: dict[int, str] = {}
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        same(answer.status_code, 200, "status of a stream")
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    same(lines[-1], "[DONE]", "the last event")
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return answer.headers["x-replica"], [texts[i] for i in sorted(texts)]


def main() -> None:
    """Start, ask, hang up, stop."""
    print(f"ray {version('ray')}")
    port = free_port()
    env = {**os.environ, "SPECRS_SERVE_SERVED_NAMES": MODEL, "SPECRS_SERVE_LOG": "none", "RAY_DEDUP_LOGS": "0",
           "SPECRS_SERVE_ENGINE": '{"max_batch": 8}', "RAY_USAGE_STATS_ENABLED": "0"}  # fmt: skip
    argv = [sys.executable, str(ROOT / "examples/ray_serve.py"), "--model", os.environ["MODEL_DIR"],
            "--draft", os.environ["DRAFT_DIR"], "--replicas", "2", "--cpus", "0.5", "--port", str(port)]  # fmt: skip
    log = Path(os.environ["WORK"]) / "ray.log"
    with log.open("w") as out:
        process = subprocess.Popen(argv, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        began = time.monotonic()
        while "replicas at" not in log.read_text():
            if process.poll() is not None or time.monotonic() - began > 300:
                raise SystemExit(log.read_text()[-4000:])
            time.sleep(0.5)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            seen: dict[str, int] = {}
            for turn in range(8):
                for case in EXPECT["completions"]:
                    body = {"model": MODEL, "prompt": case["prompt"], **case["params"]}
                    if turn % 2:
                        replica, texts = streamed(client, body)
                    else:
                        answer = client.post("/v1/completions", json=body)
                        same(answer.status_code, 200, answer.text)
                        replica, texts = answer.headers["x-replica"], [c["text"] for c in answer.json()["choices"]]
                    seen[replica] = seen.get(replica, 0) + 1
                    same(texts, case["texts"], "texts")
            for case in EXPECT["chats"]:
                body = {"model": MODEL, "messages": case["prompt"], **case["params"]}
                found = client.post("/v1/chat/completions", json=body).json()
                same([c["message"]["content"] for c in found["choices"]], case["texts"], "content")
            same(len(seen), 2, f"replicas that answered: {seen}")
            refused = client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "temperature": -1})
            same((refused.status_code, refused.json()["error"]["param"]), (400, "temperature"), "an error")
            # A client that hangs up: Ray tells the replica, whose engine drops the request.
            endless = {"model": MODEL, "prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
            for _ in range(4):
                with client.stream("POST", "/v1/completions", json=endless) as answer:
                    next(answer.iter_lines())
            began = time.monotonic()
            while running(client) and time.monotonic() - began < 30:
                time.sleep(0.2)
            same(running(client), 0.0, "requests that run on without a reader")
            print(f"answers by replica: {sorted(seen.values())}")
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()


def running(client: httpx.Client) -> float:
    """Requests that run, at most, in the replicas that a few questions reach."""
    found = 0.0
    for _ in range(8):
        for line in client.get("/metrics").text.splitlines():
            if line.startswith("vllm:num_requests_running{"):
                found = max(found, float(line.split()[-1]))
    return found


if __name__ == "__main__":
    main()
