"""Strangers reach the data plane and nothing else, on a running server, whatever routes its libraries bring."""

import http.client
import json
import re
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from beam_rl import cli

DATA_PLANE = {
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/inference/v1/generate"),
}
OPEN = DATA_PLANE | {("GET", "/health")}
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


@pytest.fixture
def client(servers: list[Any]) -> httpx.Client:
    return httpx.Client(base_url=servers[0].url, trust_env=False, timeout=60)


def routes(live: Any, server: Any, client: httpx.Client) -> set[str]:
    """Every path that the server knows: from its OpenAPI document, and from the route table that vLLM logs."""
    described = client.get("/openapi.json", headers=live.authorized()).json()["paths"]
    logged = re.findall(r"Route: (/\S*?),", server.log.read_text())
    admin = [f"/beam/admin/{name}" for name in ("status", "prepare", "commit", "rollback", "release")]
    return {re.sub(r"\{.*?\}", "x", path) for path in (*described, *logged, *admin)}


def test_without_a_token_only_the_data_plane_answers(live: Any, servers: list[Any], client: httpx.Client) -> None:
    paths = routes(live, servers[0], client)
    assert len(paths) > 50
    for known in ("/pause", "/collective_rpc", "/update_weights", "/invocations", "/metrics", "/docs", "/tokenize"):
        assert known in paths, f"the server was to have {known}"
    assert {path for _, path in DATA_PLANE} <= paths
    answered = {
        (method, path)
        for path in paths
        for method in METHODS
        if client.request(method, path, json={}).status_code != 401
    }
    assert answered == OPEN


def test_the_admin_token_opens_the_rest(live: Any, client: httpx.Client) -> None:
    for path in ("/metrics", "/is_paused", "/version", "/beam/admin/status"):
        assert client.get(path, headers=live.authorized()).status_code == 200
    assert client.get("/beam/admin/nothing", headers=live.authorized()).status_code == 404


def test_wrong_tokens_and_schemes_are_refused(live: Any, client: httpx.Client) -> None:
    token = live.TOKEN
    wrong: list[list[tuple[str, str]]] = [
        [("Authorization", value)]
        for value in (
            f"Bearer {token}x",
            f"Bearer {token[:-1]}",
            f"Bearer {token.upper()}",
            "Bearer",
            token,
            f"Basic {token}",
            f"bearer {token}",
            f"Bearer  {token}",
            f"Token {token}",
            "Bearer None",
        )
    ]
    wrong += [
        [("Authorization", f"Bearer {token}"), ("Authorization", "Bearer other")],
        [("X-Api-Key", token)],
        [("Cookie", f"token={token}")],
    ]
    for headers in wrong:
        for path in ("/beam/admin/status", "/is_paused"):
            assert client.get(path, headers=headers).status_code == 401, headers
    assert client.get(f"/is_paused?token={token}&api_key={token}").status_code == 401


@pytest.mark.parametrize(
    "target",
    [
        "//pause", "/pause/", "/PAUSE", "/Pause", "/%70ause", "/pause%2f", "/pause;x", "/./pause", "/v1/../pause",
        "/v1/models/../../pause", "/v1/models/..%2f..%2fpause", "/%2fpause", "/pause%00",
        "/v1/models%2f..%2f..%2fpause",
        "http://localhost/pause", "/v1//models", "//v1/models", "/v1/models/", "/V1/models", "/v1/%6dodels",
        "/v1/models%20",
        "/v1/models/x", "/health/", "//health", "/beam/admin/status/", "/%62eam/admin/status", "//beam/admin/status",
        "/beam//admin/status", "/Beam/admin/status", "*",
    ],
)  # fmt: skip
def test_other_spellings_of_a_path_open_nothing(servers: list[Any], target: str) -> None:
    for method in ("GET", "POST"):
        assert exchange(servers[0].url, f"{method} {target} HTTP/1.1", b"{}") in (400, 401, 404)


def exchange(url: str, line: str, body: bytes, headers: str = "") -> int:
    """The status of a request that is sent exactly as given."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        head = f"{line}\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        connection.sendall(head.encode() + body)
        response = http.client.HTTPResponse(connection)
        response.begin()
        return response.status


def test_a_body_too_large_is_refused_announced_or_not(live: Any, servers: list[Any], client: httpx.Client) -> None:
    """The servers of this suite take 16 MiB."""
    parts = urlsplit(servers[0].url)
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 17000000000\r\n\r\n")
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 413
    piece = bytes(2**20)
    for path, headers in (("/v1/completions", {}), ("/beam/admin/prepare", live.authorized())):
        with pytest.raises(httpx.HTTPStatusError if path is None else Exception) as caught:
            client.post(path, content=(piece for _ in range(32)), headers=headers).raise_for_status()
        response = getattr(caught.value, "response", None)
        assert response is None or response.status_code == 413  # None: it hung up on the rest
    assert client.get("/health").status_code == 200


def test_a_body_that_never_ends_is_given_up(servers: list[Any], client: httpx.Client) -> None:
    """The servers of this suite wait 5 s for a body."""
    parts = urlsplit(servers[0].url)
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"mod')
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 408
        assert response.getheader("connection") == "close"


def test_websockets_are_refused(servers: list[Any]) -> None:
    headers = (
        "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    )
    for path in ("/v1/realtime", "/v1/models", "/pause"):
        status = exchange(servers[0].url, f"GET {path} HTTP/1.1", b"", headers)
        assert status in (400, 401, 403, 426), f"{path}: {status}"


def test_the_token_is_in_no_log_command_line_or_environment(
    live: Any, servers: list[Any], client: httpx.Client
) -> None:
    client.get("/is_paused", headers=live.authorized())
    client.get(f"/is_paused?token={live.TOKEN}")
    client.get("/beam/admin/status", headers=live.authorized())
    client.post("/beam/admin/commit", headers=live.authorized(), json={"lease": live.TOKEN})
    time.sleep(0.5)
    for server in servers:
        assert live.TOKEN not in server.log.read_text()
        for pid in (server.process.pid, *server.children()):
            process = psutil.Process(pid)
            assert live.TOKEN not in " ".join(process.cmdline())
            assert live.TOKEN not in str(process.environ())


def test_every_server_says_which_fast_paths_are_active(servers: list[Any]) -> None:
    """The servers of this suite run at most 20 sequences."""
    for server in servers:
        log = server.log.read_text()
        assert "could not be found out" not in log
        assert re.search(r"beam-rl serve: on +chunked prefill +steps of .*, 20 sequences$", log, re.MULTILINE)
        for name in ("CUDA graphs", "8-bit KV cache", "speculation"):
            assert re.search(rf"beam-rl serve: (on|off) +{name} ", log), name


def test_it_listens_on_this_machine_only(servers: list[Any]) -> None:
    port = urlsplit(servers[0].url).port
    found = [
        connection.laddr.ip
        for pid in servers[0].children()
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    ]
    assert set(found) == {"127.0.0.1"}


def test_openai_answers_say_which_weights_made_them(servers: list[Any], client: httpx.Client) -> None:
    version = servers[0].status()["version"]
    body = {"model": "A", "prompt": ["1+2=", "3+4="], "max_tokens": 3, "n": 2, "ignore_eos": True}
    whole = client.post("/v1/completions", json=body)
    assert whole.headers["x-beam-weight-versions"] == "; ".join([f"{version}:0-3"] * 4)
    streamed = client.post("/v1/completions", json=body | {"stream": True})
    comment = re.search(r"^: x-beam-weight-versions (.*)$", streamed.text, re.MULTILINE)
    assert comment is not None
    assert comment[1] == whole.headers["x-beam-weight-versions"]
    assert streamed.text.rstrip().endswith("data: [DONE]")
    for line in streamed.text.splitlines():
        assert line == "" or line.startswith((": x-beam", "data: ")), line
        if line.startswith("data: {"):
            json.loads(line[6:])


def test_a_token_others_can_read_is_refused(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    for content, mode, why in (
        ("short", 0o600, "at least"),
        ("a" * 20, 0o644, "others may read"),
        ("a b" * 9, 0o600, "at"),
    ):
        token.write_text(content)
        token.chmod(mode)
        assert cli.main(["serve", str(models["A"]), "--admin-token-file", str(token)]) == 2
        message = capsys.readouterr().err
        assert why in message
        assert content not in message
