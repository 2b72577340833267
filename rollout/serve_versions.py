"""Which weights made which tokens, told in every response.

vLLM tracks the weight version of every token, but only `/inference/v1/generate` shows it. Here every answer of the data
plane gets it: as the header `x-beam-weight-versions`, and a streamed one, whose headers go out before its tokens exist,
as a comment in the stream before its end, which clients of server-sent events skip unless they look for it.
"""

import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from starlette.types import Message, Send

HEADER = "x-beam-weight-versions"

_current: ContextVar["Spans | None"] = ContextVar("beam_spans", default=None)


class Spans:
    """Versions of one HTTP response's tokens, by choice: `step-3-1f2e3d4c:0-12,step-4-5a6b7c8d:12-40; …`."""

    def __init__(self) -> None:
        self.choices: dict[tuple[int, int], str] = {}
        """Spans by the prompt's number in the request and the sample's index, once it is finished."""

    def add(self, output: Any) -> None:
        """Look at one of the engine's outputs."""
        for choice in output.outputs:
            if choice.weight_versions:
                number = re.search(r"-(\d+)$", output.request_id)
                key = (int(number[1]) if number else 0, choice.index)
                self.choices[key] = ",".join(
                    f"{span.version}:{span.start}-{span.end}" for span in choice.weight_versions
                )

    def __str__(self) -> str:
        return "; ".join(self.choices[key] for key in sorted(self.choices))

    def sender(self, send: Send) -> Send:
        """A `send` that adds the spans to the response; the engine's outputs of this context are from now on its."""
        _current.set(self)
        streamed = False

        async def sending(message: Message) -> None:
            nonlocal streamed
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", []))
                streamed = any(k == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers)
                if self.choices:
                    headers.append((HEADER.encode(), str(self).encode()))
                message = {**message, "headers": headers}
            elif streamed and self.choices and b"data: [DONE]" in message.get("body", b""):
                comment = f": {HEADER} {self}\n\n".encode()
                message = {**message, "body": message["body"].replace(b"data: [DONE]", comment + b"data: [DONE]")}
            await send(message)

        return sending


def record(engine: Any) -> None:
    """Let the engine's outputs pass by the response that they are for."""
    original = engine.generate

    async def generate(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
        async with aclosing(original(*arguments, **options)) as outputs:
            async for output in outputs:
                spans = _current.get()
                if spans is not None:
                    spans.add(output)
                yield output

    engine.generate = generate
