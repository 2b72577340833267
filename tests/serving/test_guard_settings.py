"""The guard's settings, on a small application: what is closed stays closed, whatever is configured."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from beam_rl.rollout import serve_settings
from beam_rl.rollout.serve_guard import Guard
from beam_rl.rollout.serve_settings import ServeSettings

ADMIN, KEY = "the-admins-token-0123", "the-clients-key-0123"
Ask = Callable[..., int]


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Guard, Ask]]:
    """Builds a guard with settings; returns it, and a function from method, path and token to a status."""

    def build(**settings: Any) -> tuple[Guard, Ask]:
        for name, token in (("admin", ADMIN), ("key", KEY)):
            (tmp_path / name).write_text(token)
        common = {"model": "", "store": "", "prefix": "", "initial": "", "dtype": "float32"}
        path = tmp_path / "serve.json"
        path.unlink(missing_ok=True)
        ServeSettings(**common | settings).write(path)
        monkeypatch.setenv(serve_settings.VARIABLE, str(path))

        async def application(scope: Any, receive: Any, send: Any) -> None:
            body = (await receive())["body"]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": body})

        guard = Guard(application)

        def ask(method: str, path: str, token: str | None = None) -> int:
            async def request() -> int:
                transport = httpx.ASGITransport(guard)
                async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
                    return (await client.request(method, path, headers=headers, content=b"text")).status_code

            return asyncio.run(request())

        return guard, ask

    return build


def test_without_an_admin_token_the_control_plane_is_closed_to_everybody(guarded: Any, tmp_path: Path) -> None:
    _, ask = guarded()
    for token in (None, ADMIN, "", "None"):
        assert ask("POST", "/pause", token) == 401
    assert ask("POST", "/v1/completions") == 200


def test_the_data_planes_key_opens_the_data_plane_alone(guarded: Any, tmp_path: Path) -> None:
    _, ask = guarded(admin_token_file=str(tmp_path / "admin"), api_key_file=str(tmp_path / "key"))
    assert ask("POST", "/v1/completions", KEY) == 200
    assert ask("POST", "/pause", KEY) == 401
    for token in (None, "wrong", ADMIN):
        assert ask("POST", "/v1/completions", token) == 401
    assert ask("POST", "/pause", ADMIN) == 200
    assert ask("GET", "/health") == 200


@pytest.mark.parametrize("access", ["open", "admin"])
def test_health_and_metrics_are_as_open_as_configured(guarded: Any, tmp_path: Path, access: str) -> None:
    _, ask = guarded(admin_token_file=str(tmp_path / "admin"), health=access, metrics=access)
    for path in ("/health", "/metrics"):
        assert ask("GET", path) == (200 if access == "open" else 401)
        assert ask("GET", path, ADMIN) == 200
        assert ask("POST", path) == 401


def test_a_server_without_whole_weights_answers_nobody_and_says_so_to_health_checks(guarded: Any) -> None:
    guard, ask = guarded()
    guard.control.broken = "the engine lost its weights"
    assert ask("POST", "/v1/completions") == 503
    assert ask("GET", "/health") == 503


def test_the_guard_starts_only_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(serve_settings.VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match="beam-rl serve"):
        Guard(lambda scope, receive, send: None)  # type: ignore[arg-type, return-value]
