"""Many generations in one HTTP request: order, errors, and everything else as before."""

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteGenerateClient
from starlette.testclient import TestClient

from beam_rl.batched_route import PATH, BatchedRoute
from beam_rl.client import BATCH, BatchingClient


def app() -> FastAPI:
    """A server with an endpoint like SkyRL's, and the middleware."""
    application = FastAPI()
    application.state.scale = 2

    @application.post("/skyrl/v1/generate")
    async def generate(request: Request) -> Response:
        token = (await request.json())["token_ids"][0]
        await asyncio.sleep(0.01 * (5 - token % 5))  # later requests are done first
        return Response(f'{{"choices": [{{"token_ids": [{request.app.state.scale * token}]}}]}}')

    application.add_middleware(BatchedRoute)
    return application


def test_responses_come_in_the_order_of_the_requests() -> None:
    with TestClient(app()) as client:
        body = client.post(PATH, json=[{"token_ids": [token]} for token in range(10)]).json()
        assert [r["choices"][0]["token_ids"] for r in body["responses"]] == [[2 * token] for token in range(10)]
        single = client.post("/skyrl/v1/generate", json={"token_ids": [3]}).json()
        assert single["choices"][0]["token_ids"] == [6]
        assert client.get("/openapi.json").status_code == 200


class Recording(BatchingClient):
    """A client whose HTTP requests are answered here."""

    def __init__(self) -> None:
        super().__init__(proxy_url="http://engine")
        self.batches: list[list[Any]] = []

    async def send(self, batch: list[Any]) -> None:
        self.batches.append([request for request, _ in batch])
        for request, answer in batch:
            answer.set_result({"echo": request})


def test_what_is_asked_at_once_goes_out_together() -> None:
    async def ask() -> list[Any]:
        client = Recording()
        answers = await asyncio.gather(*(client._post("http://engine/skyrl/v1/generate", i) for i in range(BATCH + 3)))
        assert [len(batch) for batch in client.batches] == [BATCH, 3]
        return answers

    assert asyncio.run(ask()) == [{"echo": i} for i in range(BATCH + 3)]


def test_every_caller_hears_of_a_reply_of_another_length(monkeypatch: pytest.MonkeyPatch) -> None:
    async def short(*_: Any, **__: Any) -> dict[str, Any]:
        return {"responses": [{}]}

    async def ask() -> list[Any]:
        monkeypatch.setattr(RemoteGenerateClient, "_post", short)
        client = BatchingClient(proxy_url="http://engine")
        asked = (client._post("http://engine/skyrl/v1/generate", {"i": i}) for i in range(3))
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), timeout=10)

    assert ["3 generations with 1" in str(answer) for answer in asyncio.run(ask())] == [True] * 3


def test_every_caller_hears_of_a_failed_request() -> None:
    """Aborted requests that notify nobody leave their callers waiting for ever (vllm-project/tpu-inference#3362)."""

    async def ask() -> None:
        client = BatchingClient(proxy_url="http://127.0.0.1:9")  # nobody listens there
        answers = await asyncio.wait_for(
            asyncio.gather(
                *(client._post("http://127.0.0.1:9/skyrl/v1/generate", {"i": i}) for i in range(3)),
                return_exceptions=True,
            ),
            timeout=120,
        )
        assert all(isinstance(answer, OSError) for answer in answers)
        await client.aclose()

    with pytest.MonkeyPatch.context() as patch:
        from skyrl.backends.skyrl_train.inference_servers import remote_inference_client

        patch.setattr(remote_inference_client, "_DATA_PLANE_RETRIES", 1)
        asyncio.run(ask())
