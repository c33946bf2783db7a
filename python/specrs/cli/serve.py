"""``specrs serve``: OpenAI's API over HTTP, for one model.

Exit status 0 after SIGTERM or SIGINT, once requests have ended; 1 where the engine could not go on, did not answer at
the end or lost pages, and after a second signal, which ends at once; 2 where it could not start.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specrs._specrs import ConfigError
from specrs.cli import options

if TYPE_CHECKING:
    from specrs.serve import ServeConfig

#: Fields of `ServeConfig`, by what the command line calls them.
_OPTIONS = {
    "model": "model", "draft": "draft", "served_names": "served_model_name", "chat_template": "chat_template",
    "host": "host", "port": "port", "uds": "uds", "root_path": "root_path", "keep_alive_seconds": "keep_alive_seconds",
    "allowed_hosts": "allowed_host", "cors_origins": "cors_origin",
    "max_waiting": "max_waiting", "max_waiting_tokens": "max_waiting_tokens", "max_body_bytes": "max_body_bytes",
    "tool_call_parser": "tool_call_parser", "reasoning_parser": "reasoning_parser", "max_n": "max_n",
    "drain_seconds": "drain_seconds", "log": "log",
}  # fmt: skip


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    p = commands.add_parser("serve", help="OpenAI's API over HTTP", description=__doc__)
    options.add_models(p, positional=True)
    p.add_argument("--no-draft", action="store_true", help="decode plainly")
    p.add_argument("--served-model-name", action="append", metavar="NAME",
                   help="what requests call the model; may be repeated (default: of the model)")  # fmt: skip
    p.add_argument("--chat-template", metavar="FILE", help="template of conversations (default: the model's own)")
    p.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="how the model writes tool calls: hermes, llama3, mistral, none (default: auto, by its template)",
    )
    p.add_argument("--reasoning-parser", metavar="NAME",
                   help="how it marks its reasoning: think, mistral, none (default: auto)")  # fmt: skip
    p.add_argument("--host", help="address to listen at (default: 127.0.0.1)")
    p.add_argument("--port", type=int, help="0: a free one (default: 8000)")
    p.add_argument("--uds", metavar="PATH", help="a Unix domain socket to listen at instead of host and port")
    p.add_argument("--root-path", metavar="PATH",
                   help="where a proxy serves this server, if it takes that away: /llm, say")  # fmt: skip
    p.add_argument("--api-key-file", metavar="FILE",
                   help="a key on each line, or its digest as sha256:HEX (also: SPECRS_API_KEY)")  # fmt: skip
    p.add_argument("--allow-public-without-key", action="store_true",
                   help="let other machines ask without a key")  # fmt: skip
    p.add_argument("--allowed-host", action="append", metavar="NAME",
                   help="a name that requests may ask for; may be repeated (default: any, or with no key on loopback "
                        "the names of this machine)")  # fmt: skip
    p.add_argument("--cors-origin", action="append", metavar="ORIGIN", help="a web page that may ask; * for all")
    p.add_argument("--no-playground", action="store_true", help="no page to try the model on at /")
    p.add_argument("--no-engine-process", action="store_true",
                   help="run the engine in a thread of this process, not in a process of its own")  # fmt: skip
    options.add_threads(p)
    options.add_engine(p)
    limits = p.add_argument_group("limits (more by SPECRS_SERVE_NAME and specrs.serve.ServeConfig: docs/serving.md)")
    limits.add_argument("--max-waiting", type=int, metavar="N", help="requests that may wait; 429 beyond (512)")
    limits.add_argument("--max-waiting-tokens", type=int, metavar="N", help="their prompt tokens (1048576)")
    limits.add_argument("--max-body-bytes", type=int, metavar="N", help="of a request (8388608)")
    limits.add_argument("--max-n", type=int, metavar="N", help="of n and best_of (128)")
    limits.add_argument("--keep-alive-seconds", type=float, metavar="T",
                        help="that a connection stays open between two requests (30)")  # fmt: skip
    limits.add_argument("--drain-seconds", type=float, metavar="T", help="for requests to end after SIGTERM (30)")
    limits.add_argument("--log", choices=("requests", "errors", "none"),
                        help="lines of JSON on stdout: one a request, those that fail, none (requests)")  # fmt: skip
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve.

    Raises:
        ConfigError: the extra is not installed; and as `specrs.serve.run`.
    """
    for module in ("starlette", "uvicorn", "prometheus_client"):
        try:
            importlib.import_module(module)
        except ImportError:
            wheel = """pip install "$(echo dist/specrs-*.whl)[serve]\""""  # specrs is on no index
            raise ConfigError(f"specrs serve needs {module}: {wheel}") from None
    from specrs.serve import run as serve

    options.set_threads(args)
    return serve(config_of(args))


def config_of(args: argparse.Namespace) -> ServeConfig:
    """Return the server's configuration from the command line, and below it from the environment."""
    from specrs.serve import Keys, ServeConfig

    config = ServeConfig.from_env()
    given = {name: value for name, option in _OPTIONS.items() if (value := getattr(args, option)) is not None}
    if args.api_key_file is not None:
        given["keys"] = Keys(config.keys.digests + Keys.from_file(args.api_key_file).digests)
    if args.no_draft:
        given["speculative"] = False
    if args.no_engine_process:
        given["engine_process"] = False
    if args.no_playground:
        given["playground"] = False
    if args.allow_public_without_key:
        given["allow_public_without_key"] = True
    return replace(config, engine={**config.engine, **options.engine_options(args)}, **given)
