"""Replicas of `specrs serve` behind Ray Serve: an engine each, and one address before them.

    pip install "$(echo dist/specrs-*.whl)[serve]" "ray[serve]"
    python examples/ray_serve.py --replicas 2 --port 8000                            # the model in the package, on CPUs
    python examples/ray_serve.py --replicas 4 --gpus 1 --model org/name --draft org/head

Each replica is a process with weights, KV pages and prefix cache of its own; nothing is shared, and a request lives in
one of them. The server's own options come from the environment (``SPECRS_SERVE_DRAIN_SECONDS=60``), as in a container.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ray import serve

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


def build() -> Any:
    """Return the ASGI application of one replica, made in its process; its responses say which replica gave them."""
    from specrs.serve import ServeConfig, app

    inner = app(ServeConfig.from_env())

    async def named(scope: Message, receive: Any, send: Send) -> None:
        name = serve.get_replica_context().replica_id.unique_id.encode()

        async def with_name(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-replica", name)]}
            await send(message)

        await inner(scope, receive, with_name if scope["type"] == "http" else send)

    return named


# Requests beyond `max_ongoing_requests` of each replica wait in Ray's queue, and beyond `max_queued_requests` get 503;
# the replica's own limit is `max_waiting`, beyond which it says 429.
@serve.deployment(max_ongoing_requests=256, max_queued_requests=1024, graceful_shutdown_timeout_s=60)
@serve.ingress(build)
class Specrs:
    """One replica. Ray replaces it where `check_health` raises."""

    async def check_health(self) -> None:
        """Raise where ``GET /health`` would fail: the engine's thread must be there, and its device and ledger
        sound."""
        statuses: list[int] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
            "path": "/health", "raw_path": b"/health", "root_path": "", "query_string": b"", "headers": [],
            "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        await self.app(scope, receive, send)
        if statuses != [200]:
            raise RuntimeError(f"/health says {statuses}")


def main() -> None:
    """Start the replicas, and stay until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--draft")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=1, help="of each replica, as Ray counts them")
    parser.add_argument("--gpus", type=float, default=0, help="of each replica: 1, or 0 for the CPU")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    options = {name: value for name, value in os.environ.items() if name.startswith("SPECRS_")}
    options |= {f"SPECRS_SERVE_{k}": v for k, v in (("MODEL", args.model), ("DRAFT", args.draft)) if v is not None}
    options |= {} if args.gpus else {"SPECRS_DEVICE": "cpu"}
    serve.start(http_options={"host": args.host, "port": args.port})
    replica = {"num_cpus": args.cpus, "num_gpus": args.gpus, "runtime_env": {"env_vars": options}}
    deployment = Specrs.options(num_replicas=args.replicas, ray_actor_options=replica)
    serve.run(deployment.bind(), name="specrs", route_prefix="/")
    print(f"{args.replicas} replicas at http://{args.host}:{args.port}", flush=True)
    try:
        while True:
            time.sleep(3600)
    finally:
        serve.shutdown()


if __name__ == "__main__":
    main()
