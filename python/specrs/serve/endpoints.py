"""Endpoints that generate nothing: models, tokens, and the server's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specrs._specrs import __version__
from specrs.serve.chat import chat_prompt
from specrs.serve.errors import RequestError, bad
from specrs.serve.exchange import Exchange
from specrs.serve.fields import flag, messages, prompt, template, text, variables
from specrs.serve.tool_fields import tools

if TYPE_CHECKING:
    from specrs.serve.service import Service

_TOKENIZE = {
    "model": text, "prompt": text, "messages": messages, "add_special_tokens": flag, "return_token_strs": flag,
    "add_generation_prompt": flag, "continue_final_message": flag, "chat_template": template,
    "chat_template_kwargs": variables, "tools": tools,
}  # fmt: skip
_DETOKENIZE = {"model": text, "tokens": prompt}


def models(service: Service, name: str | None = None) -> dict[str, Any]:
    """``GET /v1/models``, and ``/v1/models/NAME``."""
    found = [
        {
            "id": one, "object": "model", "created": service.created, "owned_by": "specrs", "root": service.names[0],
            "parent": None, "max_model_len": service.context,
            "specrs": {"chat": service.chats, "speculative": service.engine.llm.speculative},
        }
        for one in service.names
    ]  # fmt: skip
    if name is None:
        return {"object": "list", "data": found}
    return found[service.names.index(service.model(name))]


def _read(body: Mapping[str, Any], checks: Mapping[str, Any], service: Service) -> dict[str, Any]:
    found = {}
    for name, value in body.items():
        if name not in checks:
            raise bad(f"{name[:64]!r}: no field of this endpoint", name[:64], "unknown_parameter")
        if value is not None:
            found[name] = checks[name](name, value, service.config)
    service.model(found.get("model"))
    return found


async def tokenize(service: Service, exchange: Exchange, body: Mapping[str, Any]) -> None:
    """``POST /tokenize``: of a ``prompt``, or of the text that ``messages`` make."""
    fields = _read(body, _TOKENIZE, service)
    if ("prompt" in fields) == ("messages" in fields):
        raise bad("one of prompt and messages is needed", "prompt")
    with service.admitted(), service.preparing():
        if "prompt" in fields:
            special = fields.get("add_special_tokens", True)
            ids = await service.pooled(lambda: service.encode(fields["prompt"], special, "prompt"))
        else:
            pool = service.apart if "chat_template" in fields else service.pooled
            ids = list((await pool(lambda: chat_prompt(service, fields, None))).token_ids)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": service.context, "tokens": ids}
    found["token_strs"] = None
    if fields.get("return_token_strs"):
        found["token_strs"] = [service.tokenizer.id_to_token(token) for token in ids]
    await exchange.json(200, found)


async def detokenize(service: Service, exchange: Exchange, body: Mapping[str, Any]) -> None:
    """``POST /detokenize``: the text of ``tokens``."""
    fields = _read({**body, "tokens": body.get("tokens") or None}, _DETOKENIZE, service)
    ids = fields.get("tokens", [[]])
    if len(ids) != 1 or isinstance(ids[0], str):
        raise bad("tokens: must be a list of token ids", "tokens")
    service.check_tokens(ids[0], "tokens")
    with service.admitted(), service.preparing():
        found = await service.pooled(lambda: service.decode(ids[0], skip_special=False))
    await exchange.json(200, {"prompt": found})


def health(service: Service) -> dict[str, Any]:
    """``GET /health``: whether this process can serve at all; where it says 503, another process helps."""
    why = service.healthy()
    if why is not None:
        raise RequestError(503, why, type="server_error", code="unhealthy")
    return {"status": "ok"}


def ready(service: Service) -> dict[str, Any]:
    """``GET /ready``: whether requests should be sent here now."""
    if service.draining:
        raise RequestError(503, "shutting down", type="server_error", code="draining")
    health(service)
    return {"status": "ok"}


def version(service: Service) -> dict[str, Any]:
    """``GET /version``."""
    return {"version": __version__, "system_fingerprint": service.fingerprint}


def load(service: Service) -> dict[str, Any]:
    """``GET /load``: how much is at work; ``server_load`` is vLLM's name."""
    stats = service.engine.stats()
    return {
        "server_load": service.open_requests, "running": stats.engine.running,
        "waiting": max(stats.submitted, stats.engine.waiting), "waiting_tokens": stats.submitted_tokens,
        "kv_usage": round(stats.engine.kv_usage, 4), "healthy": stats.healthy, "draining": service.draining,
    }  # fmt: skip
