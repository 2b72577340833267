"""An OpenAI-compatible server, asked over HTTP until it gives a whole response or there is no point in asking.

What may pass is asked again with back-off: refused connections, disconnections, timeouts, HTTP 408, 409, 425, 429 and
5xx, answers that are cut short, empty or not JSON, and responses that the server aborted. What will not pass raises.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import httpx

from beam_rl.evals.results import Identity
from beam_rl.model.errors import BadInput

RETRIED = frozenset({408, 409, 425, 429, *range(500, 600)})
HOPELESS = frozenset({401, 403, 404})
"""A wrong key, model or path: no request of the run can succeed."""
UNFINISHED = frozenset({"", "abort", "error"})
"""Finish reasons of responses that the server did not finish: a pause for a weight update, for example."""
LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
PROBE_SECONDS = 10.0
"""How long a question about the server itself may take."""
SHOWN = 300
"""Characters of a server's error that are kept."""


class Completion(NamedTuple):
    """A whole response."""

    response: str
    reasoning: str | None
    tokens: int | None
    prompt_tokens: int | None
    finish_reason: str
    seconds: float
    attempts: int


class RequestFailed(Exception):
    """One request got no whole response, after all retries."""

    def __init__(self, reason: str, attempts: int, status: int | None = None) -> None:
        super().__init__(reason)
        self.attempts = attempts
        self.status = status
        """The last HTTP status; None where none came."""


class _Unusable(Exception):
    """The server answered, but not with a whole response."""


@dataclass(frozen=True)
class Retry:
    """How often and after what pauses a request is made again."""

    attempts: int = 7
    """Requests at most, the first included."""
    timeouts: int = 2
    """Of these, how many may run into the time limit: what took too long twice will again."""
    first_pause: float = 1.0
    """Seconds; each further pause is twice as long, and a random half of it is left out."""
    longest_pause: float = 60.0
    """Seconds; also what a server's Retry-After is cut to."""

    def pause(self, attempt: int, wanted: str | None) -> float:
        """Seconds to wait after attempt number `attempt`; `wanted` is the server's Retry-After."""
        drawn = min(self.longest_pause, self.first_pause * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
        try:
            return min(self.longest_pause, max(drawn, float(wanted or 0)))
        except ValueError:  # a date: rare, and the own pause will do
            return drawn


@dataclass
class Endpoint:
    """Use as `async with`: it holds the connections."""

    url: str
    """`http://host:port`, with or without the `/v1` at its end."""
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    """Its name at the server; None takes the only one that is served. Known after `identify`."""
    timeout: float = 3600.0
    """Seconds for one response, queueing included."""
    retry: Retry = Retry()
    _versioned: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        wanted = f"--endpoint {self.url!r}: give it as http://host:port or https://host/path/v1."
        try:
            parts = urlsplit(self.url)
            whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError as error:
            raise BadInput(f"{wanted} ({error})") from None
        if not whole:
            raise BadInput(wanted)
        path = parts.path.rstrip("/") or "/v1"
        self.base = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        self.root = self.base.removesuffix("/v1")
        self._local = parts.hostname in LOCAL

    async def __aenter__(self) -> "Endpoint":
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(self.timeout, connect=PROBE_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=None),  # how many requests there are at a time is the runner's
            trust_env=not self._local,
            follow_redirects=True,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def identify(self) -> Identity:
        """Which model the server has.

        Raises:
            RequestFailed: the server does not answer.
            BadInput: it wants another key, or has another model.
        """
        response = await self._get(f"{self.base}/models")
        if response.status_code in (401, 403):
            raise BadInput(
                f"{self.url} refuses the key (HTTP {response.status_code}). Name its variable: --api-key-env."
            )
        served = _served(response)
        if self.model is None and len(served) != 1:
            names = ", ".join(served) or "none it tells"
            raise BadInput(f"{self.url} serves {len(served)} models ({names}): choose one with --served-model.")
        self.model = self.model or next(iter(served))
        if served and self.model not in served:
            raise BadInput(f"{self.url} has no model {self.model!r}; it serves {', '.join(served)}.")
        entry = served.get(self.model, {})
        version = await self._optional("version", "version")
        return Identity(
            model=self.model,
            path=None if entry.get("root") is None else str(entry["root"]),
            server=f"{entry.get('owned_by') or 'server'} {version}" if version else None,
            context=_number(entry.get("max_model_len")),
        )

    async def weight_version(self) -> str | None:
        """The server's weight version now; None where it has none, or does not say."""
        return await self._optional("weight_info", "weight_version") if self._versioned else None

    async def alive(self) -> bool:
        """Whether the server answers at all."""
        try:
            return (await self._get(f"{self.base}/models")).status_code < 500
        except RequestFailed:
            return False

    async def complete(self, body: dict[str, Any]) -> Completion:
        """One chat completion. Raises RequestFailed."""
        timeouts = 0
        for attempt in range(1, self.retry.attempts + 1):
            status, wanted, started = None, None, time.monotonic()
            try:
                response = await self._http.post(f"{self.base}/chat/completions", json={"model": self.model, **body})
                status, wanted = response.status_code, response.headers.get("retry-after")
                if status == 200:
                    return _completion(response, time.monotonic() - started, attempt)
                reason = f"HTTP {status}: {_message(response)}"
                if status not in RETRIED:
                    raise RequestFailed(reason, attempt, status)
            except _Unusable as error:
                reason = str(error)
            except httpx.TimeoutException as error:
                reason = f"no response within {self.timeout:g} s ({type(error).__name__})"
                timeouts += 1
            except (httpx.HTTPError, httpx.StreamError) as error:
                reason = f"{type(error).__name__}: {error}".rstrip(": ")
            if timeouts >= self.retry.timeouts or attempt == self.retry.attempts:
                break
            await asyncio.sleep(self.retry.pause(attempt, wanted))
        raise RequestFailed(f"{reason} (attempt {attempt})", attempt, status)

    async def _get(self, url: str) -> httpx.Response:
        try:
            return await self._http.get(url, timeout=PROBE_SECONDS)
        except httpx.HTTPError as error:
            raise RequestFailed(f"{url} does not answer: {type(error).__name__} {error}".rstrip(), 1) from error

    async def _optional(self, path: str, key: str) -> str | None:
        """A value that vLLM tells beside its OpenAI interface."""
        try:
            response = await self._get(f"{self.root}/{path}")
            value = response.json()[key] if response.status_code == 200 else None
        except (RequestFailed, ValueError, KeyError, TypeError):
            return None
        if value is None and path == "weight_info":
            self._versioned = False
        return None if value is None else str(value)


def _served(response: httpx.Response) -> dict[str, dict[str, Any]]:
    """Models by name; empty where the server has no list of them."""
    try:
        return {entry["id"]: entry for entry in response.json()["data"]} if response.status_code == 200 else {}
    except (ValueError, KeyError, TypeError):
        return {}


def _completion(response: httpx.Response, seconds: float, attempts: int) -> Completion:
    """The response in an answer of status 200. Raises _Unusable: it has none, or not a whole one."""
    try:
        body = response.json()
        choice = body["choices"][0]
        message, reason, usage = choice["message"], choice["finish_reason"], body.get("usage") or {}
        content = message.get("content")
        reasoning = message.get("reasoning") or message.get("reasoning_content")
        tokens, prompt_tokens = _number(usage.get("completion_tokens")), _number(usage.get("prompt_tokens"))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _Unusable(f"HTTP 200 without a response ({type(error).__name__}): {response.text[:SHOWN]!r}") from None
    if not isinstance(reason, str) or reason in UNFINISHED:
        raise _Unusable(f"the server did not finish the response (finish_reason {reason!r})")
    if content is None and not reasoning and not tokens:
        raise _Unusable("HTTP 200 with an empty response")
    return Completion(
        response=_text(content), reasoning=_text(reasoning) or None, tokens=tokens, prompt_tokens=prompt_tokens,
        finish_reason=reason, seconds=seconds, attempts=attempts,
    )  # fmt: skip


def _number(value: Any) -> int | None:
    """A count; None for anything else that a server may say."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(content: Any) -> str:
    """A message's text; some servers give it in parts. Lone surrogates, which UTF-8 cannot hold, become `?`."""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return str(content or "").encode("utf-8", "replace").decode("utf-8")


def _message(response: httpx.Response) -> str:
    """What the server says is wrong."""
    try:
        body = response.json()
        error = body.get("error", body)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        text = response.text
    return text.strip()[:SHOWN]
