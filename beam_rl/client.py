"""SkyRL's inference client, for one engine without a router in front of it."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    RemoteGenerateClient,
    RemoteInferenceClient,
)

from beam_rl.batched_route import PATH
from beam_rl.rollouts import complete_aborted

BATCH = 32
"""Generations in one HTTP request, which is answered when the last of them is done."""
WAIT = 0.002
"""Seconds that a generation waits for company; those of a training step are asked for all at once."""

Waiting = tuple[dict[str, Any], "asyncio.Future[Any]"]


@dataclass
class CompletingClient(RemoteGenerateClient):
    """SkyRL's generation client, whose aborted requests come back as samples that nobody trains on."""

    route_shape: tuple[int, int] | None = None
    """(layers, topk) of the routes that training replays; None without R3."""

    async def _post(
        self,
        url: str,
        json: dict[str, Any],
        headers: dict[str, str] | None = None,
        *,
        packed_side_channels: bool = False,
    ) -> Any:
        answer = await super()._post(url, json, headers, packed_side_channels=packed_side_channels)
        return complete_aborted(json, answer, self.route_shape) if url.endswith("/v1/generate") else answer


@dataclass
class BatchingClient(RemoteGenerateClient):
    """Sends the generations that are asked for in one moment together (see `batched_route`)."""

    route_shape: tuple[int, int] | None = None
    """As of `CompletingClient`."""
    waiting: list[Waiting] = field(default_factory=list, init=False, repr=False)
    sending: set["asyncio.Task[None]"] = field(default_factory=set, init=False, repr=False)

    async def _post(
        self,
        url: str,
        json: dict[str, Any],
        headers: dict[str, str] | None = None,
        *,
        packed_side_channels: bool = False,
    ) -> Any:
        if not url.endswith("/v1/generate"):
            return await super()._post(url, json, headers, packed_side_channels=packed_side_channels)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        if not self.waiting:
            loop.call_later(WAIT, self.flush)
        self.waiting.append((json, answer))
        if len(self.waiting) == BATCH:
            self.flush()
        return await answer

    def flush(self) -> None:
        """Send what is waiting."""
        batch, self.waiting = self.waiting, []
        if batch:
            task = asyncio.get_running_loop().create_task(self.send(batch))
            self.sending.add(task)
            task.add_done_callback(self.sending.discard)

    async def send(self, batch: list[Waiting]) -> None:
        """One HTTP request, with SkyRL's retries; its failure is the failure of every generation in it."""
        requests: Any = [request for request, _ in batch]
        try:
            body = await super()._post(f"{self.proxy_url}{PATH}", requests, packed_side_channels=True)
            responses = body["responses"]
            if len(responses) != len(batch):
                raise RuntimeError(f"the engine answered {len(batch)} generations with {len(responses)} responses")
        except Exception as error:
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (request, answer), response in zip(batch, responses, strict=True):
            if not answer.done():  # its caller may have been cancelled
                answer.set_result(complete_aborted(request, response, self.route_shape))


class DirectClient(RemoteInferenceClient):
    """Talks to the engine itself, which has no sessions: only the router pins those to replicas."""

    async def finish_session(self, session_id: str) -> None:
        """Nothing to release."""
