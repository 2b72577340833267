"""Whatever fails, each server is wholly on one version and serves, nothing is lost, and a retry works.

Faults are real: processes are killed or stopped, connections are cut, writes fail, files vanish.
"""

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from beam_rl import swap as swapping

Swap = Callable[..., dict[str, Any]]


def test_a_full_disk_is_noticed_while_staging(
    servers: list[Any], models: dict[str, Path], swap: Swap, unharmed: None
) -> None:
    """One server may not write files over 2 MB for a while; weights have 4."""
    api = next(pid for pid in servers[1].children() if "api_server" in " ".join(psutil.Process(pid).cmdline()))
    before = resource.prlimit(api, resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))
    try:
        assert "File too large" in json.dumps(swap(models["B"], code=2))
    finally:
        resource.prlimit(api, resource.RLIMIT_FSIZE, before)


def test_a_staged_file_that_vanishes_leaves_the_old_version(
    servers: list[Any], models: dict[str, Path], unharmed: None, live: Any
) -> None:
    endpoint = swapping.Endpoint(servers[0].url, live.TOKEN, 30, 60)
    endpoint.post("prepare", weights=str(models["B"]), kind="checkpoint")
    max(Path("/dev/shm").glob("beam-serve-*.safetensors"), key=lambda path: path.stat().st_mtime).unlink()
    with pytest.raises(swapping.EndpointFailed, match="is gone"):
        endpoint.post("commit")
    endpoint.post("release")


def test_two_swaps_at_once_are_one_after_the_other(
    servers: list[Any], models: dict[str, Path], swap: Swap, unharmed: None, live: Any
) -> None:
    first = swapping.Endpoint(servers[1].url, live.TOKEN, 30, 60)
    first.post("prepare", weights=str(models["B"]), kind="checkpoint")
    assert "is exchanging weights" in json.dumps(swap(models["B"], code=1))
    assert servers[0].status()["lease"] is None, "the other server waits for nobody"
    first.post("release")


def test_a_dead_clients_lease_ends(servers: list[Any], models: dict[str, Path], unharmed: None, live: Any) -> None:
    """Killed between the phases, with everything staged."""
    code = (
        "import sys, time; from beam_rl.swap import Endpoint; e = Endpoint(sys.argv[1], sys.argv[2], 6.0, 60);"
        "e.post('prepare', weights=sys.argv[3], kind='checkpoint'); print('staged', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, servers[0].url, live.TOKEN, str(models["B"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"staged\n"
        assert servers[0].status()["staged"].startswith("B-")
        client.kill()
    end = time.monotonic() + 60
    while servers[0].status()["staged"] is not None:
        assert time.monotonic() < end
        time.sleep(0.2)


def leases_end(server: Any) -> None:
    """Wait until a server belongs to no client any more."""
    end = time.monotonic() + 60
    while server.status()["lease"] is not None:
        assert time.monotonic() < end
        time.sleep(0.3)


class Proxy:
    """A network between client and server that fails at one operation: before the server hears of it, or after."""

    def __init__(self, url: str, operation: str, when: str) -> None:
        self.target, self.operation, self.when = urlsplit(url), operation.encode(), when
        self.reached = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.cut = True
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            while head := self._message(client):
                hit = self.cut and self.operation in head.split(b"\r\n", 1)[0]
                if hit and self.when == "before":
                    self.cut = False
                    self.reached.set()
                    return
                with socket.create_connection((self.target.hostname, self.target.port)) as server:
                    server.sendall(head)
                    answer = self._message(server)
                if hit:
                    self.cut = False
                    self.reached.set()
                    if self.when == "silence":
                        time.sleep(600)
                    return
                client.sendall(answer)

    @staticmethod
    def _message(connection: socket.socket) -> bytes:
        """One HTTP message with a length, either way."""
        data = b""
        while b"\r\n\r\n" not in data:
            piece = connection.recv(65536)
            if not piece:
                return b""
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(
            (int(v) for k, _, v in (h.partition(b":") for h in head.split(b"\r\n")) if k.lower() == b"content-length"),
            0,
        )
        while len(body) < length:
            body += connection.recv(65536)
        return head + b"\r\n\r\n" + body

    def close(self) -> None:
        self._socket.close()


@contextmanager
def failing(url: str, operation: str, when: str) -> Iterator[Proxy]:
    proxy = Proxy(url, operation, when)
    try:
        yield proxy
    finally:
        proxy.close()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("operation", ["prepare", "commit"])
def test_a_cut_connection_leaves_all_servers_on_the_old_version(
    live: Any, servers: list[Any], models: dict[str, Path], swap: Swap, unharmed: None, operation: str, when: str
) -> None:
    """Cut before the server hears of the operation, or when it has done it and its answer is lost."""
    with failing(servers[1].url, operation, when) as proxy:
        report = swap(models["B"], "--lease", "3", to=[servers[0].url, proxy.url], code=1)
        assert proxy.reached.is_set()
    assert {one["outcome"] for one in report["endpoints"]} <= {"unchanged", "rolled back", "failed"}
    assert [live.serves(server) for server in servers] == ["A", "A"]


def test_a_client_killed_during_the_exchange_leaves_whole_versions(
    live: Any, servers: list[Any], models: dict[str, Path], swap: Swap
) -> None:
    """One server has exchanged and the client does not know; a retry brings both to the new version."""
    with failing(servers[1].url, "commit", "silence") as proxy:
        command = [sys.executable, "-m", "beam_rl", "swap", str(models["B"]), "--endpoint", servers[0].url]
        command += ["--endpoint", proxy.url, "--lease", "6"]
        with subprocess.Popen(command, env=os.environ | {"BEAM_RL_ADMIN_TOKEN": live.TOKEN}) as client:
            assert proxy.reached.wait(120)
            client.kill()
    assert {live.serves(server) for server in servers} <= {"A", "B"}
    assert live.serves(servers[1]) == "B"
    for server in servers:
        leases_end(server)
    report = swap(models["B"])
    assert "already there" in {one["outcome"] for one in report["endpoints"]}
    assert [live.serves(server) for server in servers] == ["B", "B"]
    swap(models["A"])


def test_a_wrong_token_changes_nothing(
    servers: list[Any], models: dict[str, Path], swap: Swap, unharmed: None, monkeypatch: pytest.MonkeyPatch, live: Any
) -> None:
    monkeypatch.setenv("BEAM_RL_ADMIN_TOKEN", "some-other-token-0123")
    assert "admin token is needed" in json.dumps(swap(models["B"], code=1))
    monkeypatch.setenv("BEAM_RL_ADMIN_TOKEN", live.TOKEN)


def test_an_endpoint_that_is_not_there_stops_the_swap_before_it_begins(
    servers: list[Any], models: dict[str, Path], swap: Swap, unharmed: None
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        report = swap(models["B"], to=[servers[0].url, nobody], code=1)
    assert [one["outcome"] for one in report["endpoints"]] == ["unchanged", "failed"]


def test_a_server_that_hangs_is_given_up_and_comes_back(
    servers: list[Any], models: dict[str, Path], swap: Swap, unharmed: None
) -> None:
    processes = [psutil.Process(pid) for pid in servers[1].children()]
    for process in processes:
        process.suspend()
    try:
        report = swap(models["B"], "--timeout", "10", "--lease", "6", code=1)
    finally:
        for process in processes:
            process.resume()
    assert [one["outcome"] for one in report["endpoints"]] == ["unchanged", "failed"]
    leases_end(servers[1])  # it stages what its client has given up


def test_requests_that_do_not_drain_in_time_go_on_and_so_does_the_old_version(
    live: Any, servers: list[Any], models: dict[str, Path], swap: Swap, unharmed: None
) -> None:
    load = live.Load([server.url for server in servers], in_flight=8)

    async def exchange() -> None:
        async with load:
            report = await asyncio.to_thread(swap, models["B"], "--drain", "0.001", code=1)
            assert "did not finish within" in json.dumps(report)

    asyncio.run(exchange())
    assert [answer.error for answer in load.answers if answer.error] == []
    assert {len(answer.spans) for answer in load.answers} == {1}


def test_drained_requests_are_of_one_version(
    live: Any, servers: list[Any], models: dict[str, Path], swap: Swap, unharmed: None
) -> None:
    load = live.Load([server.url for server in servers], in_flight=8)

    async def exchange() -> None:
        async with load:
            await asyncio.to_thread(swap, models["B"], "--drain", "120")

    asyncio.run(exchange())
    assert [answer.error for answer in load.answers if answer.error] == []
    assert {len(answer.spans) for answer in load.answers} == {1}
    assert len({answer.spans[0]["version"] for answer in load.answers}) == 2
    swap(models["A"])


def test_a_killed_engine_costs_its_own_requests_alone(
    live: Any, servers: list[Any], models: dict[str, Path], swap: Swap
) -> None:
    """Last: the second server is dead afterwards. Its engine is killed between the phases, under load."""
    loads = [live.Load([server.url], in_flight=8) for server in servers]
    engine = next(pid for pid in servers[1].children() if "EngineCore" in " ".join(psutil.Process(pid).cmdline()))

    async def exchange() -> None:
        async with loads[0]:
            await loads[1].__aenter__()
            clients = [swapping.Endpoint(server.url, live.TOKEN, 30, 60) for server in servers]
            for client in clients:
                client.post("prepare", weights=str(models["B"]), kind="checkpoint")
            os.kill(engine, signal.SIGKILL)
            clients[0].post("release")
            report = await asyncio.to_thread(swap, models["B"], "--timeout", "20", code=1)
            assert report["endpoints"][0]["outcome"] in ("unchanged", "rolled back")
            assert report["endpoints"][1]["outcome"] in ("failed", "unreachable")
            loads[1]._stop = True
            await asyncio.wait_for(loads[1].__aexit__(), 60)

    asyncio.run(exchange())
    assert [answer.error for answer in loads[0].answers if answer.error] == []
    assert [answer.error for answer in loads[1].answers if answer.error], "its own requests hear of it"
    assert live.serves(servers[0]) == "A"
    swap(models["B"], to=[servers[0].url])
    swap(models["A"], to=[servers[0].url])
