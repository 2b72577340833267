"""Real servers, a real load, and the proof of what they answered; for the tests here and `tests/benchmarks/swap.py`."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from numpy.typing import NDArray

from beam_rl import tiny
from beam_rl.eval_server import free_ports
from beam_rl.model import fused, numerics
from beam_rl.model.checkpoint import save_hf
from beam_rl.model.config import BeamConfig
from beam_rl.model.tensors import initial_tensors
from beam_rl.rollout import manifest
from beam_rl.rollout.manifest import Fingerprint, Origin

TOKEN = "an-admin-token-of-the-tests"
PROMPT, PROMPTS = 40, 6
"""Tokens of a prompt, and how many there are: they are asked again and again, so that their prefixes are cached."""
RESPONSE = (100, 300)
"""Tokens of a response: at least, at most. They differ, so that the requests do not begin and end together."""

TOLERANCE = 2e-5
"""Of a log-prob in float32."""
TIE = 1e-6
"""Difference of scores below which float32's rounding on the way there may decide which expert is chosen."""


def write_model(folder: Path, seed: int, change: float = 0.0) -> Path:
    """A tiny random Beam in float32 with its tokenizer; `change` moves every tensor, as training would."""
    config = BeamConfig(**tiny.ARCHITECTURE, architectures=["BeamForCausalLM"], dtype="float32")
    tokenizer = folder.with_name(f"{folder.name}-tokenizer")
    tiny.tokenizer().save_pretrained(tokenizer)
    generator = torch.Generator().manual_seed(17)

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + change * torch.randn(tensor.shape, generator=generator) if change else tensor

    tensors = ((name, changed(tensor)) for name, tensor in initial_tensors(config, seed, torch.float32))
    save_hf(folder, config, tensors, copy_from=tokenizer)
    return folder


@dataclass
class Server:
    """A `beam-rl serve` of ours."""

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def children(self) -> list[int]:
        """Process ids of the API server and the engine."""
        import psutil

        return [
            child.pid
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if "watchdog.py" not in " ".join(child.cmdline())
        ]

    def status(self) -> dict[str, Any]:
        """What it serves."""
        answer = httpx.get(f"{self.url}/beam/admin/status", headers=authorized(), trust_env=False, timeout=60)
        answer.raise_for_status()
        return answer.json()


def serves(server: Server) -> str:
    """The version that answers a request just now; it is the one that the server says it serves."""
    sampling = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
    body = {"token_ids": [1, 7, 9, 11], "sampling_params": sampling}
    answer = httpx.post(f"{server.url}/inference/v1/generate", json=body, trust_env=False, timeout=120)
    answer.raise_for_status()
    spans = answer.json()["choices"][0]["weight_versions"]
    status = server.status()
    assert [span["version"] for span in spans] == [status["version"]]
    assert status["broken"] is None
    return status["version"].rpartition("-")[0]


def authorized(token: str = TOKEN) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@contextmanager
def serving(model: Path, count: int, folder: Path, *options: str) -> Iterator[list[Server]]:
    """Servers of one model, started together."""
    token = folder / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    ports = enumerate(free_ports(count))
    started = [_start(model, port, folder / f"server{number}.log", token, options) for number, port in ports]
    try:
        end = time.monotonic() + 400
        while any(b"beam-rl serve: ready" not in server.log.read_bytes() for server in started):
            for server in started:
                assert server.process.poll() is None, server.log.read_text()[-4000:]
            assert time.monotonic() < end, "the servers did not become ready"
            time.sleep(0.2)
        yield started
    finally:
        for server in started:
            server.process.send_signal(signal.SIGTERM)
        for server in started:
            server.process.wait(60)


def _start(model: Path, port: int, log: Path, token: Path, options: tuple[str, ...]) -> Server:
    command = [sys.executable, "-m", "beam_rl", "serve", str(model), "--port", str(port)]
    command += ["--admin-token-file", str(token), "--engine", "max_num_seqs=20", "--body-timeout", "5", *options]
    # More routes to keep closed; and the log lists them, which an engine that ran in this process may have silenced.
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    return Server(f"http://127.0.0.1:{port}", process, log)


def beam_rl(*arguments: str | Path, check: bool = True) -> "subprocess.CompletedProcess[str]":
    """The command line, in a process of its own."""
    command = [sys.executable, "-m", "beam_rl", *map(str, arguments)]
    environment = os.environ | {"BEAM_RL_ADMIN_TOKEN": TOKEN}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@dataclass
class Answer:
    """One streamed response."""

    prompt: list[int]
    length: int
    """Tokens asked for."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None


class Load:
    """Streaming requests, so many in flight from beginning to end."""

    def __init__(self, urls: list[str], in_flight: int, vocabulary: int = tiny.VOCABULARY_SIZE) -> None:
        self.urls = urls
        self.in_flight = in_flight
        self.answers: list[Answer] = []
        self.streaming = 0
        """Requests that have had a token and are not finished."""
        self._stop = False
        self._random = random.Random(5)
        self._prompts = [[self._random.randrange(vocabulary) for _ in range(PROMPT)] for _ in range(PROMPTS)]

    async def __aenter__(self) -> "Load":
        self._client = httpx.AsyncClient(timeout=120, trust_env=False, limits=httpx.Limits(max_connections=None))
        self._workers = [asyncio.create_task(self._work(number)) for number in range(self.in_flight)]
        while self.streaming < self.in_flight * 0.8:
            await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *error: object) -> None:
        """Let what is in flight finish."""
        self._stop = True
        await asyncio.gather(*self._workers)
        await self._client.aclose()

    async def _work(self, number: int) -> None:
        while not self._stop:
            answer = Answer(self._random.choice(self._prompts), self._random.randint(*RESPONSE))
            self.answers.append(answer)
            try:
                await self._ask(self.urls[number % len(self.urls)], answer)
            except Exception as error:
                answer.error = f"{type(error).__name__}: {error}"
                await asyncio.sleep(0.2)

    async def _ask(self, url: str, answer: Answer) -> None:
        sampling = {
            "max_tokens": answer.length,
            "temperature": 1.0,
            "logprobs": 0,
            "ignore_eos": True,
            "detokenize": False,
        }
        body = {"token_ids": answer.prompt, "sampling_params": sampling, "stream": True}
        streaming = False
        try:
            async with self._client.stream("POST", f"{url}/inference/v1/generate", json=body) as response:
                if response.status_code != 200:
                    raise RuntimeError(f"status {response.status_code}: {(await response.aread()).decode()}")
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    if "choices" not in chunk:
                        raise RuntimeError(line)
                    if not streaming:
                        streaming = True
                        self.streaming += 1
                    for choice in chunk["choices"]:
                        answer.tokens += choice["token_ids"] or []
                        if choice.get("logprobs"):
                            answer.logprobs += [position["logprob"] for position in choice["logprobs"]["content"]]
                        answer.spans = choice.get("weight_versions") or answer.spans
        finally:
            self.streaming -= streaming
        if len(answer.tokens) != answer.length or len(answer.logprobs) != answer.length:
            raise RuntimeError(f"{len(answer.tokens)} tokens, {len(answer.logprobs)} log-probs")


def full_forward(models: dict[str, Path], answers: list[Answer]) -> dict[str, NDArray[np.float32]]:
    """Log-probs [answers, longest response] of the answers' tokens by version, each whole sequence scored at once.

    What stands behind a shorter response is padding, which no token before it sees.
    """
    longest = max(answer.length for answer in answers)
    tokens = torch.tensor([one.prompt + one.tokens + [0] * (longest - one.length) for one in answers])
    return {name: trainer_score(model, tokens)[:, PROMPT - 1 :].numpy() for name, model in models.items()}


def trainer_score(model: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probs [rows, tokens - 1] by the trainer's engine."""
    from beam_rl.trainer.score import score

    return score(model, tokens, "float32")["token_logprobs"]


def describe(model: Path, origin: Origin | None = None) -> None:
    """Write a checkpoint's manifest with the trainer's fingerprint, as an export does."""
    tokens = manifest.probe_tokens(tiny.VOCABULARY_SIZE)
    logprobs = trainer_score(model, torch.tensor([tokens]))[0].tolist()
    manifest.write(model, origin, Fingerprint(tokens, logprobs, "trainer"))


def distance(
    answers: list[Answer], scored: dict[str, NDArray[np.float32]], models: dict[str, Path] | None = None
) -> tuple[float, int]:
    """Largest difference between a token's log-prob and that of a full forward under the version its span names.

    Where two experts' scores are equal to within float32's rounding, two right programs may choose differently, and
    everything behind differs. With `models` (by version) such tokens are left out; the second number counts answers
    that have some. About one token in 14,000 is so near a tie, so a wrong version or a stale cache does not hide there.
    """
    largest, ties = 0.0, 0
    for row, answer in enumerate(answers):
        assert answer.spans[0]["start"] == 0
        assert answer.spans[-1]["end"] == answer.length
        for before, after in zip(answer.spans, answer.spans[1:], strict=False):
            assert before["end"] == after["start"]
        for span in answer.spans:
            start, end = span["start"], span["end"]
            apart = np.abs(scored[span["version"]][row, start:end] - np.array(answer.logprobs[start:end]))
            if models is not None and apart.max() > TOLERANCE:
                tie = first_tie(models[span["version"]], answer.prompt + answer.tokens[:end])
                if tie is not None:
                    ties += 1
                    apart = apart[: max(0, tie + 1 - PROMPT - start)]
            largest = max(largest, float(apart.max(initial=0.0)))
    return largest, ties


def first_tie(model: Path, tokens: list[int]) -> int | None:
    """The first position at which the router's choice hangs on less than `TIE`; None if there is none."""
    margins: list[torch.Tensor] = []
    original = fused.route

    def route(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, topk: int, n_group: int, topk_group: int, *rest: Any
    ) -> tuple[torch.Tensor, ...]:
        logits = numerics.router_logits(x, weight).detach()
        grouped = (logits.sigmoid() + bias).unflatten(1, (n_group, -1))
        sums = grouped.topk(2, dim=-1).values.sum(-1)
        best = sums.topk(topk_group + 1, dim=-1)
        allowed = grouped.gather(1, best.indices[:, :topk_group, None].expand(-1, -1, grouped.shape[2])).flatten(1)
        chosen = allowed.topk(topk + 1, dim=-1).values
        margins.append(torch.minimum(-best.values.diff()[:, -1], -chosen.diff()[:, -1]))
        return original(x, weight, bias, topk, n_group, topk_group, *rest)

    fused.route = route
    try:
        trainer_score(model, torch.tensor([tokens]))
    finally:
        fused.route = original
    assert margins, "the trainer no longer routes with fused.route"
    near = (torch.stack(margins).amin(0)[: len(tokens)] < TIE).nonzero()
    return int(near[0]) if len(near) else None
