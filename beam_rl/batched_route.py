"""An ASGI middleware (vLLM's `--middleware`) through which many generations come as one HTTP request.

A training step asks for hundreds of short responses. As one request each, more than half of the time would go into
HTTP, routing and metrics on both sides. Every generation still goes through SkyRL's own endpoint function.
"""

import asyncio
from typing import Any

import orjson
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

PATH = "/beam/v1/generate"
GENERATE = "/skyrl/v1/generate"
"""SkyRL's endpoint for one generation."""


class Generation:
    """What SkyRL's endpoint reads of a request."""

    def __init__(self, app: Any, body: Any) -> None:
        self.app = app
        self.body = body

    async def json(self) -> Any:
        return self.body


class BatchedRoute:
    """Answers POST `PATH`: a JSON list of generation requests gives {"responses": [their responses, in order]}."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self.app(scope, receive, send)
            return
        app = scope["app"]
        endpoint = next(route.endpoint for route in app.routes if isinstance(route, Route) and route.path == GENERATE)
        requests = orjson.loads(await body_of(receive))
        responses = await asyncio.gather(*(endpoint(Generation(app, request)) for request in requests))
        body = b'{"responses":[' + b",".join(response.body for response in responses) + b"]}"
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def body_of(receive: Receive) -> bytes:
    """The whole body of a request."""
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
