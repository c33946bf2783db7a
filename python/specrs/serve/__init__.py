"""``specrs serve``: an HTTP server with OpenAI's API, over `specrs.AsyncLLM`.

    application = specrs.serve.app(ServeConfig(model="org/name"))   # ASGI, for uvicorn, Ray Serve, ...
    specrs.serve.run(ServeConfig(model="org/name"))                 # what `specrs serve` does

Needs Starlette and uvicorn, which the wheel's extra ``serve`` brings. Nothing of the package imports this but the
command line.
"""

from __future__ import annotations

from specrs.serve.app import app
from specrs.serve.config import ServeConfig
from specrs.serve.keys import Keys
from specrs.serve.process import new_event_loop, run, server

__all__ = ["Keys", "ServeConfig", "app", "new_event_loop", "run", "server"]
