"""An ASGI middleware (vLLM's `--middleware`) that takes rollout requests past the rest of the web stack.

A training step sends hundreds of short generations. For each, vLLM's application tries some sixty routes, twice, and
fills metrics that nobody reads here: half of the server's time. This finds SkyRL's generate route once.
"""

from contextlib import AsyncExitStack
from typing import Any

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

PATH = "/skyrl/v1/generate"


class DirectRoute:
    """Outermost middleware: `PATH` goes to its route directly, everything else down the stack."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.route: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self.app(scope, receive, send)
            return
        if self.route is None:
            self.route = next(r for r in scope["app"].routes if isinstance(r, Route) and r.path == PATH)
        async with AsyncExitStack() as stack:
            scope["fastapi_middleware_astack"] = stack  # where FastAPI keeps what a request opens
            scope["path_params"] = {}
            scope["endpoint"] = self.route.endpoint
            await self.route.handle(scope, receive, send)
