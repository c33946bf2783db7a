"""The ASGI application: routes, and the life of the engine behind them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from specrs._specrs import ConfigError, SpecrsError
from specrs.engine import AsyncLLM
from specrs.serve import endpoints, errors
from specrs.serve.chat import chat
from specrs.serve.completions import completions
from specrs.serve.config import ServeConfig
from specrs.serve.errors import RequestError
from specrs.serve.exchange import Exchange, Gone, Receive, Scope, Send
from specrs.serve.middleware import Guarded, Hosts, Recorded, refuse
from specrs.serve.playground import page
from specrs.serve.responses import NOT_STORED, input_tokens, responses
from specrs.serve.service import LAST_WORDS, Service

_logger = logging.getLogger("specrs.serve")
Work = Callable[[Service, Exchange, Mapping[str, Any]], Awaitable[None]]
Say = Callable[[Service], Mapping[str, Any]]


def app(config: ServeConfig | Mapping[str, Any] | None = None, engine: AsyncLLM | None = None) -> Any:
    """An ASGI application that serves one model.

    Args:
        config: ``None``: of the environment (`ServeConfig.from_env`), so that servers that make applications by
            themselves need no code: ``uvicorn --factory specrs.serve:app``.
        engine: an engine that the caller made, and closes; ``None``: the server makes one of the config when it starts.

    ``app.state.service`` has what the requests share while the application lives, ``app.state.engine`` the engine.

    Raises:
        ConfigError: an invalid config, a ``chat_template`` that cannot be read, or Starlette is missing.
    """
    try:
        from starlette.applications import Starlette
        from starlette.middleware.cors import CORSMiddleware
        from starlette.routing import Route
    except ImportError as e:
        raise ConfigError(f"{MISSING} ({e})") from None
    if config is None:
        config = ServeConfig.from_env()
    elif not isinstance(config, ServeConfig):
        config = ServeConfig.of(config)
    config.check_template()

    posts = {
        "/v1/completions": completions, "/v1/chat/completions": chat, "/v1/responses": responses,
        "/v1/responses/input_tokens": input_tokens, "/tokenize": endpoints.tokenize,
        "/detokenize": endpoints.detokenize,
    }  # fmt: skip
    generating = (completions, chat, responses)
    gets: dict[str, Say] = {
        "/v1/models": endpoints.models, "/health": endpoints.health, "/ready": endpoints.ready,
        "/version": endpoints.version, "/load": endpoints.load,
    }  # fmt: skip
    routes = [Route(path, Posted(work, work in generating), methods=["POST"]) for path, work in posts.items()]
    routes += [Route(path, Asked(say), methods=["GET"]) for path, say in gets.items()]
    routes.append(Route("/v1/models/{name:path}", Asked(None), methods=["GET"]))
    routes.append(Route("/v1/responses/{rest:path}", Unstored(), methods=["GET", "POST", "DELETE"]))
    routes.append(Route("/metrics", Measured(), methods=["GET"]))
    if config.playground:
        routes.append(Route("/", Shown(), methods=["GET"]))
    made = Starlette(routes=routes, lifespan=_lifespan(config, engine), exception_handlers=_HANDLERS)
    made.state.config = config
    if config.keys:
        made.add_middleware(Guarded, keys=config.keys)
    if config.cors_origins:
        made.add_middleware(
            CORSMiddleware, allow_origins=list(config.cors_origins), allow_methods=["GET", "POST"],
            allow_headers=["*"], expose_headers=["X-Request-Id", "Retry-After"],
        )  # fmt: skip
    made.add_middleware(Hosts, hosts=config.allowed_hosts)
    made.add_middleware(Recorded, state=made.state)
    return made


MISSING = """specrs serve needs Starlette and uvicorn: pip install "$(echo dist/specrs-*.whl)[serve]\""""


def _lifespan(config: ServeConfig, given: AsyncLLM | None) -> Any:
    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        engine = await asyncio.to_thread(make_engine, config) if given is None else given
        app.state.engine = engine
        app.state.service = service = Service(config, engine, owned=given is None)
        tasks = [asyncio.ensure_future(service.watch.run()), asyncio.ensure_future(service.guard())]
        try:
            with engine.watching_steps(service.metrics.step):
                yield
        finally:
            await service.drain()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await service.audit()
            if given is None:
                with suppress(TimeoutError):  # the thread ends with its step
                    await engine.aclose(drain=False, grace=0.0 if service.failed else LAST_WORDS)
            service.close()

    return lifespan


def make_engine(config: ServeConfig) -> AsyncLLM:
    """The engine that a config asks for. Takes as long as `specrs.LLM` takes."""
    return AsyncLLM(
        config.model, config.draft, speculative=config.speculative, process=config.engine_process,
        max_waiting=config.max_waiting, max_waiting_tokens=config.max_waiting_tokens, **config.engine,
    )  # fmt: skip


class Posted:
    """An endpoint that takes a body. generates: true if the engine must have room for the request."""

    def __init__(self, work: Work, generates: bool) -> None:
        self._work, self._generates = work, generates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection, as ASGI calls it."""
        service: Service = scope["app"].state.service
        config = service.config
        exchange = Exchange(scope, receive, send, scope["specrs.record"])
        service.watch.add(exchange)
        try:
            if self._generates:
                service.check_room()
            body = await exchange.body(config.max_body_bytes, config.body_seconds, service.pooled)
            await exchange.attend(self._work(service, exchange, body))
        except Gone:
            exchange.record.gone = True
        except Exception as error:
            told = errors.of(error, config.retry_after_seconds)
            if told.code == "internal_error":
                _logger.error("%s: a fault of the server", exchange.record.request_id, exc_info=error)
            service.metrics.refused(error)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(exchange.error(told), config.send_seconds or None)
        finally:
            service.watch.discard(exchange)


class Asked:
    """An endpoint that answers with JSON. say: ``None``: the model that the path names."""

    def __init__(self, say: Say | None) -> None:
        self._say = say

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection, as ASGI calls it."""
        service: Service = scope["app"].state.service
        try:
            if self._say is None:
                told = endpoints.models(service, scope["path_params"]["name"])
            else:
                told = dict(self._say(service))
        except RequestError as error:
            await refuse(scope, receive, send, error)
        else:
            await Exchange(scope, receive, send, scope["specrs.record"]).json(200, told)


class Unstored:
    """Refuses requests about a stored response: none is stored here."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection, as ASGI calls it."""
        await refuse(scope, receive, send, RequestError(404, NOT_STORED, code="not_found"))


class Measured:
    """``GET /metrics``."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection, as ASGI calls it."""
        service: Service = scope["app"].state.service
        body, kind = service.metrics.text()
        await Exchange(scope, receive, send, scope["specrs.record"]).whole(200, body, kind)


class Shown:
    """``GET /``: the playground."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection, as ASGI calls it."""
        body, headers = page()
        await Exchange(scope, receive, send, scope["specrs.record"]).whole(
            200, body, b"text/html; charset=utf-8", headers
        )


async def _not_found(request: Any, error: Any) -> Any:
    """Answer a path or method that does not exist, in OpenAI's form."""
    from starlette.responses import JSONResponse

    messages = {404: "no such path", 405: "this path has no such method"}
    told = RequestError(error.status_code, messages.get(error.status_code, str(error.detail)), code="not_found")
    return JSONResponse(told.body, error.status_code, headers=error.headers)


async def _fault(request: Any, error: Exception) -> Any:
    """Answer an error that nobody foresaw, in OpenAI's form."""
    from starlette.responses import JSONResponse

    told = errors.of(error, 1.0) if isinstance(error, SpecrsError) else errors.of(RuntimeError(), 1.0)
    return JSONResponse(told.body, told.status)


_HANDLERS: dict[Any, Any] = {404: _not_found, 405: _not_found, Exception: _fault}
