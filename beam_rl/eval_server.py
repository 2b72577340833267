"""A vLLM server of our own for the length of an evaluation, with the rollout's engine profile."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from beam_rl.model.errors import BadInput
from beam_rl.rollout.profile import CPU_ENVIRONMENT, PROFILES, Device

SERVER = "vllm.entrypoints.openai.api_server"
NAME = "beam"
"""The model's name at the server."""
START_SECONDS = 3600.0
"""A server that is not ready after this never will be: half a terabyte of weights loads in less."""
LOOK_SECONDS = 0.2
SHOWN_LINES = 12
"""Lines of the server's log in a message about its end."""


class ServerFailed(Exception):
    """The server ended, or never became ready."""


@dataclass(frozen=True)
class EngineServer:
    """A running server."""

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def died(self) -> str | None:
        """Why the server has ended; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the vLLM server {how}; the end of {self.log}:\n{tail(self.log)}"


def device() -> Device:
    """The profile that this machine's vLLM takes."""
    import torch

    return "gpu" if torch.cuda.is_available() else "cpu"


def check_seed(where: Device, seed: int | None) -> None:
    """Raise BadInput for seeds that the engine cannot take."""
    if seed is not None and where == "cpu":
        raise BadInput("--seed: vLLM's CPU engine fails on seeds of single requests. Leave it out.")


def command(model: Path, where: Device, port: int, concurrency: int, extra: Mapping[str, Any]) -> list[str]:
    """The server's command line; `extra` wins over the profile."""
    arguments: dict[str, Any] = {
        "model": str(model),
        "served_model_name": NAME,
        "host": "127.0.0.1",
        "port": port,
        "max_num_seqs": concurrency,
        "disable_uvicorn_access_log": True,
        "generation_config": "vllm",  # what the checkpoint would add (top-k, ...) is not among the settings reported
        **PROFILES[where].engine_args(),
        **({"enforce_eager": True} if where == "cpu" else {"reasoning_parser": "beam"}),
    }
    return [sys.executable, "-m", SERVER, *options({**arguments, **extra})]


def options(arguments: Mapping[str, Any]) -> Iterator[str]:
    """vLLM's options from the names of its `EngineArgs`."""
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield f"--{flag}"
            yield json.dumps(value) if isinstance(value, dict | list) else str(value)


@contextmanager
def serving(
    model: Path, where: Device, log: Path, concurrency: int, extra: Sequence[str] = ()
) -> Iterator[EngineServer]:
    """A server of `model` that answers, for the length of the block; it is stopped however the block ends.

    Should this process be killed, whoever holds `lifetime.bounded` around the block ends the server.

    Args:
        model: checkpoint folder with a tokenizer and its chat template.
        where: the profile to use.
        log: file for what the server prints.
        concurrency: requests that it runs at a time.
        extra: vLLM arguments as `name=value`, for example `tensor_parallel_size=8`.

    Raises:
        BadInput: an argument is not `name=value`.
        ServerFailed: the server did not become ready.
    """
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1"}
    if where == "cpu":
        environment |= {name: os.environ.get(name, value) for name, value in CPU_ENVIRONMENT.items()}
    (port,) = free_ports(1)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command(model, where, port, concurrency, dict(map(parsed, extra))),
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
    server = EngineServer(f"http://127.0.0.1:{port}", process, log)
    try:
        wait_until_ready(server)
        yield server
    finally:
        stop(process)


def parsed(argument: str) -> tuple[str, Any]:
    """`name=value` as vLLM's argument. Raises BadInput."""
    name, equals, value = argument.partition("=")
    if not equals or not name:
        raise BadInput(f"--engine {argument!r}: give vLLM's arguments as name=value, for example max_model_len=32768.")
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on, all different. Raises ServerFailed.

    Not those that the kernel would give: until a server has started, it might give them to a connection.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20000, 30000), 100):  # engines seed `random` itself, all alike
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise ServerFailed(f"found no {count} free ports on 127.0.0.1")


def wait_until_ready(server: EngineServer) -> None:
    """Return when the server is healthy. Raises ServerFailed: it ended, or takes too long."""
    end = time.monotonic() + START_SECONDS
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        while time.monotonic() < end:
            why = server.died()
            if why is not None:
                raise ServerFailed(why)
            try:
                if client.get(f"{server.url}/health").status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # not listening yet
            time.sleep(LOOK_SECONDS)
    raise ServerFailed(f"the vLLM server is not ready after {START_SECONDS:g} s; see {server.log}")


def stop(process: "subprocess.Popen[bytes]", patience: float = 20.0) -> None:
    """End a server and the processes that it started."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it leads a process group of its own
    process.wait()


def tail(log: Path) -> str:
    """The last lines of a log that say something."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-SHOWN_LINES:])
