"""``specrs serve``: OpenAI's API over HTTP, for one model.

Exit status 0 after SIGTERM or SIGINT, once requests have ended; 1 where the engine could not go on, or pages were lost.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from specrs.cli import options

_PLAIN = ("max_waiting", "max_waiting_tokens", "max_body_bytes", "max_n", "drain_seconds", "log", "chat_template")


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    p = commands.add_parser("serve", help="OpenAI's API over HTTP", description=__doc__)
    p.add_argument("model", nargs="?", metavar="MODEL",
                   help="Hugging Face directory, or org/name; default: the small model in the package")  # fmt: skip
    p.add_argument("--draft", help="directory, or org/name, of an EAGLE head for the model")
    p.add_argument("--no-draft", action="store_true", help="decode plainly")
    p.add_argument("--served-model-name", action="append", metavar="NAME",
                   help="what requests call the model; may be repeated (default: of the model)")  # fmt: skip
    p.add_argument("--chat-template", metavar="FILE", help="template of conversations (default: the model's own)")
    p.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    p.add_argument("--port", type=int, default=8000, help="0: a free one (default: %(default)s)")
    p.add_argument("--api-key-file", metavar="FILE",
                   help="a key on each line, or its digest as sha256:HEX (also: SPECRS_API_KEY)")  # fmt: skip
    p.add_argument("--allow-public-without-key", action="store_true",
                   help="let other machines ask without a key")  # fmt: skip
    p.add_argument("--allowed-host", action="append", metavar="NAME",
                   help="a name that requests may ask for; may be repeated (default: any, or with no key on loopback "
                        "the names of this machine)")  # fmt: skip
    p.add_argument("--cors-origin", action="append", metavar="ORIGIN", help="a web page that may ask; * for all")
    options.add_device(p)
    options.add_threads(p)
    engine = p.add_argument_group("engine")
    engine.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    engine.add_argument("--kv-dtype", help="element type of the KV caches (default: the device's)")
    engine.add_argument("--max-batch", type=int, default=8, help="requests at once (default: %(default)s)")
    engine.add_argument("--max-context", type=int, metavar="N", help="tokens of a request (default: the model's limit)")
    engine.add_argument("--num-pages", type=int, help="KV pages (default: a full load, or what the GPU holds)")
    engine.add_argument("--prefill-chunk", type=int, help="prompt tokens of a step")
    options.add_tree(engine)
    options.add_attention(engine)
    limits = p.add_argument_group("limits (more by SPECRS_SERVE_NAME and specrs.serve.ServeConfig: docs/serving.md)")
    limits.add_argument("--max-waiting", type=int, metavar="N", help="requests that may wait; 429 beyond (512)")
    limits.add_argument("--max-waiting-tokens", type=int, metavar="N", help="their prompt tokens (1048576)")
    limits.add_argument("--max-body-bytes", type=int, metavar="N", help="of a request (8388608)")
    limits.add_argument("--max-n", type=int, metavar="N", help="of n and best_of (128)")
    limits.add_argument("--drain-seconds", type=float, metavar="T", help="for requests to end after SIGTERM (30)")
    limits.add_argument("--log", choices=("requests", "errors", "none"),
                        help="lines of JSON on stdout: one a request, those that fail, none (requests)")  # fmt: skip
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve."""
    from specrs.serve import run as serve

    options.set_threads(args)
    return serve(config_of(args))


def config_of(args: argparse.Namespace) -> Any:
    """Of the command line, and below it of the environment."""
    from dataclasses import replace

    from specrs.serve import Keys, ServeConfig

    config = ServeConfig.from_env()
    given: dict[str, Any] = {name: value for name in _PLAIN if (value := getattr(args, name)) is not None}
    keys = config.keys if args.api_key_file is None else Keys(
        config.keys.digests + Keys.from_file(args.api_key_file).digests
    )  # fmt: skip
    engine = {
        **options.engine_options(args), "dtype": args.dtype, "kv_dtype": args.kv_dtype, "max_batch": args.max_batch,
        "max_context_len": args.max_context, "num_pages": args.num_pages,
    }  # fmt: skip
    if args.prefill_chunk is not None:
        engine["prefill_chunk"] = args.prefill_chunk
    names = {"served_names": args.served_model_name, "allowed_hosts": args.allowed_host,
             "cors_origins": args.cors_origin}  # fmt: skip
    given |= {name: value for name, value in names.items() if value is not None}
    model = config.model if args.model is None else os.fspath(args.model)
    return replace(
        config, model=model, draft=config.draft if args.draft is None else args.draft,
        speculative=config.speculative and not args.no_draft, engine={**engine, **config.engine}, host=args.host,
        port=args.port, keys=keys,
        allow_public_without_key=args.allow_public_without_key or config.allow_public_without_key, **given,
    )  # fmt: skip
