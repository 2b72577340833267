"""Inference servers that take weights from a trainer: SkyRL's, without Ray, each on one GPU."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from beam_rl.eval_server import free_ports
from tests.gpu.engines import ENVIRONMENT

PATIENCE = 200.0
"""Seconds that a server may take to start, and to answer."""
PROMPT = list(range(1, 60))
DIGESTS = "tests.gpu.digests.Digests"


@dataclass(frozen=True)
class Receiver:
    """How a server gets its weights."""

    backend: str
    """By its name in vLLM's factory."""
    additional: dict[str, Any] = field(default_factory=dict)
    """vLLM's `additional_config`."""
    gpu: int = 0
    """The server's, of those visible."""


@dataclass(frozen=True)
class Server:
    """An inference server of this test."""

    pid: int
    url: str
    log: Path

    def post(self, route: str, body: Any = None) -> Any:
        """The answer to a request."""
        import requests

        answer = requests.post(f"{self.url}{route}", json=body, timeout=PATIENCE)
        if not answer.ok:
            raise RuntimeError(f"{route}: {answer.status_code} {answer.text[:1000]}\n{self.said()}")
        return answer.json() if answer.content else None

    def wait(self) -> float:
        """Until it answers; returns how many seconds ago it was started."""
        import requests

        process = psutil.Process(self.pid)
        while time.time() < process.create_time() + PATIENCE and process.status() != psutil.STATUS_ZOMBIE:
            try:
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    return time.time() - process.create_time()
            except requests.RequestException:
                pass
            time.sleep(0.5)
        raise RuntimeError(f"{self.log.stem} did not start\n{self.said()}")

    def said(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-4000:]

    def digests(self) -> dict[str, str]:
        """Of every parameter."""
        (found,) = self.post("/collective_rpc", {"method": "beam_digests"})["results"]
        return found

    def greedy(self) -> list[int]:
        """The most likely continuation, through CUDA graphs."""
        # With a cached prefix the prompt would be rounded otherwise.
        self.post("/reset_prefix_cache", {"reset_running_requests": True})
        sampling = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, "detokenize": False}
        body = {"model": "beam", "token_ids": PROMPT, "sampling_params": sampling}
        return self.post("/inference/v1/generate", body)["choices"][0]["token_ids"]


@contextmanager
def serving(model: Path, receivers: Mapping[str, Receiver]) -> Iterator[dict[str, Server]]:
    """Servers of a model with random weights, by name; they begin to start, all at once. Logs go beside the model."""
    module = [sys.executable, "-m", "tests.gpu.sync_server"]
    ports = dict(zip(receivers, free_ports(len(receivers)), strict=True))
    commands = {name: [*module, *_arguments(model, one, ports[name])] for name, one in receivers.items()}
    with started(model.parent, commands, ports, {name: one.gpu for name, one in receivers.items()}) as servers:
        yield servers


@contextmanager
def started(
    folder: Path, commands: Mapping[str, list[str]], ports: Mapping[str, int], gpus: Mapping[str, int]
) -> Iterator[dict[str, Server]]:
    """Servers by name, each from its command, on its port and GPU; they begin to start, all at once. Logs go to folder.

    Afterwards nothing is left of them.
    """
    servers, processes = {}, []
    try:
        for name, command in commands.items():
            log = folder / f"{name.replace(' ', '-').replace(',', '')}.log"
            environment = os.environ | ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": _device(gpus.get(name, 0))}
            with log.open("wb") as out:
                process = subprocess.Popen(
                    command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
            processes.append(process)
            servers[name] = Server(process.pid, f"http://127.0.0.1:{ports[name]}", log)
        yield servers
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it left behind
            process.wait()


def _device(gpu: int) -> str:
    """What a process sees that is to see one GPU of ours."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible[gpu] if len(visible) > gpu and visible[gpu] else str(gpu)


def _arguments(model: Path, receiver: Receiver, port: int) -> list[str]:
    values = {
        "model": model,
        "max-model-len": 1024,
        "max-num-seqs": 64,
        "gpu-memory-utilization": 0.25,
        "kv-cache-memory-bytes": 4 * 2**30,
        "served-model-name": "beam",
        "load-format": "dummy",
        "dtype": "bfloat16",
        "logprobs-mode": "processed_logprobs",
        "worker-extension-cls": DIGESTS,
        "weight-transfer-config": json.dumps({"backend": receiver.backend}),
        "additional-config": json.dumps(receiver.additional),
        "compilation-config": json.dumps({"cudagraph_capture_sizes": [1, 8, 64]}),
        "host": "127.0.0.1",
        "port": port,
    }
    flags = ["--skip-tokenizer-init", "--enable-sleep-mode", "--enable-return-routed-experts"]
    return flags + [part for name, value in values.items() for part in (f"--{name}", str(value))]
