"""The door of a server (vLLM's `--middleware`): data plane and control plane apart, everything unknown closed.

Only requests that name a route of the data plane exactly, byte for byte and with its method, count as data plane. All
others need the admin token, whatever vLLM or a library may serve there, today or after an upgrade. So spelling tricks
gain nothing: what is not the canonical spelling of an open route is closed.
"""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from beam_rl.rollout.active import announce
from beam_rl.rollout.serve_admin import PREFIX, answer
from beam_rl.rollout.serve_settings import ServeSettings
from beam_rl.rollout.serve_versions import Spans
from beam_rl.rollout.swap_control import Control

DATA_PLANE = frozenset(
    {
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/inference/v1/generate"),
    }
)
"""Methods and paths of the data plane. Aborting requests is not among them: it could be somebody else's request."""


@dataclass
class Refused(Exception):
    """A request that goes no further."""

    status: HTTPStatus
    why: str
    close: bool = True
    """The connection cannot be used again, because the request's body was not read."""


class Guard:
    """ASGI middleware; one a server."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.settings = ServeSettings.read()
        self.admin_token = _secret(self.settings.admin_token_file)
        self.api_key = _secret(self.settings.api_key_file)
        self.control = Control(self.settings)
        routes: Mapping[tuple[str, str], str] = {
            ("GET", "/health"): self.settings.health,
            ("GET", "/metrics"): self.settings.metrics,
        }
        self.open = {route for route, access in routes.items() if access == "open"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._start(scope, receive, send)
        elif scope["type"] == "http":
            await self._request(scope, receive, send)
        else:  # nothing of the data plane is a websocket
            await send({"type": "websocket.close", "code": 1008, "reason": "refused"})

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take hold of the engine before the first request is accepted."""
        try:
            engine = scope["app"].state.engine_client
            await self.control.start(engine)
            await announce(engine)
        except Exception as error:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": f"{type(error).__name__}: {error}"})
            return
        await self.app(scope, receive, send)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            data_plane = self._admit(scope)
            body = await asyncio.wait_for(self._body(scope, receive), self.settings.body_seconds)
        except TimeoutError:
            late = f"the request's body did not arrive within {self.settings.body_seconds:g} s"
            await _refuse(send, Refused(HTTPStatus.REQUEST_TIMEOUT, late))
            return
        except Refused as refused:
            await _refuse(send, refused)
            return
        if not data_plane and scope["path"].startswith(PREFIX):
            await _send(send, *await answer(self.control, scope["method"], scope["path"], body))
            return
        if data_plane and self.control.broken is not None:
            await _refuse(send, Refused(HTTPStatus.SERVICE_UNAVAILABLE, self.control.broken, close=False))
            return
        if (scope["method"], scope["path"]) not in DATA_PLANE or scope["method"] == "GET":
            await self.app(scope, _replay(body, receive), send)
            return
        self.control.in_flight += 1
        try:
            await self.app(scope, _replay(body, receive), Spans().sender(send))
        finally:
            self.control.in_flight -= 1

    def _admit(self, scope: Scope) -> bool:
        """Whether the request is to the data plane, or to a route as open as it. Raises Refused: no right to it."""
        given = _bearer(scope)
        route = (scope["method"], scope["path"])
        canonical = scope.get("raw_path", b"") == scope["path"].encode() and not scope.get("root_path")
        if canonical and route in self.open:
            return True
        if canonical and route in DATA_PLANE:
            if self.api_key is not None and not hmac.compare_digest(given, self.api_key):
                raise Refused(HTTPStatus.UNAUTHORIZED, "this server wants its API key: Authorization: Bearer KEY")
            return True
        if self.admin_token is None or not hmac.compare_digest(given, self.admin_token):
            raise Refused(HTTPStatus.UNAUTHORIZED, "not a route of the data plane; the admin token is needed")
        return False

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body. Raises Refused: it is too large, or the client went away."""
        limit = self.settings.max_body_bytes
        too_large = Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is larger than {limit:,} bytes")
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > limit:
            raise too_large
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(HTTPStatus.BAD_REQUEST, "the client went away")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise too_large
            if not message.get("more_body", False):
                return b"".join(parts)


def _secret(path: str | None) -> bytes | None:
    """Digest of the token in a file: of one length, so that comparing takes one time."""
    return None if path is None else hashlib.sha256(Path(path).read_bytes()).digest()


def _bearer(scope: Scope) -> bytes:
    """Digest of the request's one bearer token; of nothing where there is none, or more than one."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, token = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
    known = scheme == b"Bearer" and token != b""
    return hashlib.sha256(token).digest() if known else bytes(32)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body already read, then whatever the server says next (the client's leaving)."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


async def _refuse(send: Send, refused: Refused) -> None:
    headers = {"connection": "close"} if refused.close else {}
    if refused.status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    await _send(send, refused.status, {"error": refused.why}, headers)


async def _send(send: Send, status: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
    body = json.dumps(content).encode()
    pairs = {"content-type": "application/json", "content-length": str(len(body))} | dict(headers or {})
    encoded = [(name.encode(), value.encode()) for name, value in pairs.items()]
    await send({"type": "http.response.start", "status": int(status), "headers": encoded})
    await send({"type": "http.response.body", "body": body})
