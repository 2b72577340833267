"""Weights from a trainer to rollout engines on the same GPU, 7.2 B of them: seconds of pause, and whether all arrive.

A pause is what SkyRL does between training and the next rollout: the engine, asleep, takes its weights' memory back,
gets the new weights, and takes its KV cache's memory back. NCCL needs a second GPU; its engine does not sleep.
"""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

from beam_rl import apart
from beam_rl.model.checkpoint import save_hf
from beam_rl.model.config import BeamConfig
from beam_rl.model.tensors import initial_tensors
from beam_rl.rollout.transfer import BACKEND, IPC_BACKEND, NCCL_BACKEND
from tests.gpu.engines import ENVIRONMENT
from tests.gpu.measure import SHAPE
from tests.gpu.rollout import SKYRL, small

REPETITIONS, WARM_UP = 5, 1
ENOUGH = 20.0
"""Seconds of a case after which it is not repeated any more."""
PAUSE = 1.0
"""Most seconds that a pause may take."""
PATIENCE = 300.0
"""Seconds that a server may take to start."""
TRUST = {"beam_trust_layout": True}
"""The servers have dummy weights, which prove nothing; the proof has an engine of its own."""
BUFFER = 2**30
"""Bytes of the packed buffer, as SkyRL has it for this model."""
PROMPT = list(range(1, 60))


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
        """Until it answers; returns the time then."""
        import requests

        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE:
            try:
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    return time.perf_counter()
            except requests.RequestException:
                pass
            time.sleep(0.5)
        raise RuntimeError(f"{self.log.stem} did not start\n{self.said()}")

    def said(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-4000:]

    def checksums(self) -> dict[str, str]:
        """SHA-256 of every parameter."""
        return self.post("/weight_checker", {"action": "checksum"})["checksums"]

    def greedy(self) -> list[int]:
        """The most likely continuation, through CUDA graphs."""
        sampling = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, "detokenize": False}
        body = {"model": "beam", "token_ids": PROMPT, "sampling_params": sampling}
        return self.post("/inference/v1/generate", body)["choices"][0]["token_ids"]


@contextmanager
def serving(
    folder: Path, backends: Mapping[str, tuple[str, dict[str, Any]]], gpu: int = 0
) -> Iterator[dict[str, Server]]:
    """Servers of the model in `folder`, by name, with these receiving backends and additional configurations."""
    servers, processes = {}, []
    try:
        for name, (backend, additional) in backends.items():
            port, log = _free_port(), folder / f"{name.replace(' ', '-').replace(',', '')}-{gpu}.log"
            command = [sys.executable, "-m", "tests.gpu.sync_server", *_arguments(folder / "model", port)]
            command += ["--weight-transfer-config", json.dumps({"backend": backend})]
            command += ["--additional-config", json.dumps(additional)]
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            device = visible[gpu] if len(visible) > gpu and visible[gpu] else str(gpu)
            environment = os.environ | ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": device}
            with log.open("wb") as out:
                process = subprocess.Popen(
                    command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                )
            processes.append(process)
            servers[name] = Server(process.pid, f"http://127.0.0.1:{port}", log)
        yield servers
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it left behind
            process.wait()


def _arguments(model: Path, port: int) -> list[str]:
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
        "worker-extension-cls": SKYRL,
        "compilation-config": json.dumps({"cudagraph_capture_sizes": [1, 8, 64]}),
        "host": "127.0.0.1",
        "port": port,
    }
    flags = ["--skip-tokenizer-init", "--enable-sleep-mode", "--enable-return-routed-experts"]
    return flags + [part for name, value in values.items() for part in (f"--{name}", str(value))]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(report: Callable[[str, Any], None]) -> None:
    shared = {
        "CUDA IPC, vLLM's reload": ("skyrl_ipc", {}),
        "CUDA IPC, direct": (IPC_BACKEND, TRUST),
        "shared memory": (BACKEND, {}),
    }
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(1) as pool:
        folder = Path(temporary)
        BeamConfig(**SHAPE, architectures=["BeamForCausalLM"], dtype="bfloat16").save_pretrained(folder / "model")
        proof = pool.submit(apart.call, prove, folder / "small")
        with serving(folder, shared) as servers:
            results = apart.call(one_gpu, servers)
            log = servers["CUDA IPC, direct"].log.read_text(errors="replace")
            assert "written directly" in log, f"the engine did not write directly:\n{log[-4000:]}"
        for key, value in results.items():
            report(key, value)
        report("proof against a checkpoint: tensors written directly", proof.result())
        if torch.cuda.device_count() > 1:
            across = {"NCCL, vLLM's reload": (NCCL_BACKEND, {}), "NCCL, direct": (NCCL_BACKEND, TRUST)}
            with serving(folder, across, gpu=1) as servers:
                for key, value in apart.call(two_gpus, servers).items():
                    report(key, value)
        else:
            report("NCCL", "not measured: it needs two GPUs")
    pause = results["CUDA IPC, direct: pause, s"]
    assert pause <= PAUSE, f"a pause of {pause:.2f} s is longer than {PAUSE} s"


# The trainer's process


def one_gpu(servers: dict[str, Server]) -> dict[str, Any]:
    """Results of everything on one GPU."""
    started = time.perf_counter()
    engine, size = trainer()
    found: dict[str, Any] = {"trainer: parameters, billions": size[0], "trainer: bytes of weights, GB": size[1] / 1e9}
    for name, server in servers.items():
        found[f"{name}: seconds to start"] = server.wait() - started
    reload, direct, file = servers.values()
    randomise(engine, 1)
    found |= measured("CUDA IPC, vLLM's reload", reload, sender(engine, reload, "ipc"), size[1])
    found |= measured("CUDA IPC, direct", direct, sender(engine, direct, "ipc", fused=True), size[1])
    try:
        found |= measured("shared memory", file, file_sender(engine, file), size[1], warm_up=0)
    except RuntimeError as error:  # nothing else hangs on it
        found["shared memory: failed"] = str(error)[-1500:]
    with ThreadPoolExecutor(3) as pool:
        by_reload, first, by_file = pool.map(Server.checksums, (reload, direct, file))
    said = direct.greedy()
    found["greedy tokens equal to the reload's, of 16"] = sum(map(int.__eq__, said, reload.greedy()))
    assert first == by_reload, _differing("direct and reloaded weights", first, by_reload)
    found["parameters that differ after a file"] = sum(first[name] != by_file[name] for name in first)
    randomise(engine, 2)
    found |= measured("CUDA IPC, direct, expert by expert", direct, sender(engine, direct, "ipc"), size[1])
    second = direct.checksums()
    kept = [name for name in first if first[name] == second[name] and not name.endswith("correction_bias")]
    assert not kept, f"{len(kept)} parameters did not change, among them {kept[:3]}"
    assert direct.greedy() != said, "the engine goes on with its old weights"
    randomise(engine, 1)
    sender(engine, direct, "ipc", fused=True)()
    assert (again := direct.checksums()) == first, _differing("the same weights, sent twice", again, first)
    assert direct.greedy() == said, "the same weights give other tokens"
    found["weights A, B and A again"] = f"{len(first)} checksums: as sent"
    return found


def two_gpus(servers: dict[str, Server]) -> dict[str, Any]:
    """Results of NCCL, from this process's first GPU to the servers' one."""
    engine, size = trainer()
    found: dict[str, Any] = {}
    sums = []
    randomise(engine, 1)
    for name, server in servers.items():
        server.wait()
        direct = "direct" in name
        found |= measured(name, server, sender(engine, server, "nccl", fused=direct), size[1], asleep=False)
        sums.append(server.checksums())
    assert sums[0] == sums[1], _differing("direct and reloaded weights", *sums)
    return found


def trainer() -> tuple[Any, tuple[float, int]]:
    """An engine without an optimizer; its parameters in billions, and the bytes that it sends."""
    from beam_rl.trainer.engine import EngineConfig, TrainerEngine

    engine = TrainerEngine(EngineConfig(optimizer=None))
    engine.build(BeamConfig(**SHAPE, architectures=["BeamForCausalLM"], dtype="bfloat16"))
    described = [tensor for _, tensor in engine.rollout_description()]
    return engine, (sum(t.numel() for t in described) / 1e9, sum(t.nbytes for t in described))


@torch.no_grad()
def randomise(engine: Any, seed: int) -> None:
    """Weights that are others for another seed."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for parameter in engine.models[0].parameters():
        parameter.normal_(0, 0.02, generator=generator)
        if parameter.dim() == 1:
            parameter.add_(1)
    torch.cuda.synchronize()


def sender(engine: Any, server: Server, kind: str, *, fused: bool = False) -> Callable[[], None]:
    """SkyRL's sending half, as `build_trainer_engine` sets it up."""
    from skyrl.backends.skyrl_train.weight_sync import weight_senders
    from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient, nccl_init_payloads
    from skyrl.backends.skyrl_train.weight_sync.register import register_trainer_engines
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from beam_rl.trainer.weights import EngineWeights

    register_trainer_engines()
    common = {"packed": True, "packed_buffer_size_bytes": BUFFER, "rank": 0}
    if kind == "ipc":
        info = weight_senders.get_skyrl_ipc_trainer()[0](**common)
        client = SkyrlWeightSyncClient([server.url])
    else:
        place = {"master_address": "127.0.0.1", "master_port": _free_port(), "world_size": 2}
        info = weight_senders.get_skyrl_nccl_trainer()[0](**place, **common)
        client = SkyrlWeightSyncClient([server.url], init_payload_fn=nccl_init_payloads)
    source = EngineWeights(engine, fused_experts=fused)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source).send_weights


def file_sender(engine: Any, server: Server) -> Callable[[], None]:
    """This project's sending half for files."""
    from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient

    from beam_rl.rollout.transfer import ShmTrainer, ShmTrainerInit
    from beam_rl.workers import ExportedWeights

    room = os.statvfs("/dev/shm")
    directory = "/dev/shm" if room.f_bavail * room.f_frsize > 20e9 else tempfile.gettempdir()
    client = SkyrlWeightSyncClient([server.url])
    init = ShmTrainerInit(rank=0, directory=directory)
    return ShmTrainer.trainer_init(init, client=client, source=ExportedWeights(engine)).send_weights


def measured(
    name: str, server: Server, send: Callable[[], None], size: int, *, asleep: bool = True, warm_up: int = WARM_UP
) -> dict[str, Any]:
    """Medians of a pause and its parts."""
    begin = time.perf_counter()
    parts: list[list[float]] = []
    for repetition in range(warm_up + REPETITIONS):
        if asleep:
            server.post("/sleep?level=2")
        times = [time.perf_counter()]
        server.post("/wake_up?tags=weights" if asleep else "/pause?mode=keep&clear_cache=true")
        times.append(time.perf_counter())
        send()
        times.append(time.perf_counter())
        server.post("/wake_up?tags=kv_cache" if asleep else "/resume")
        times.append(time.perf_counter())
        if repetition >= warm_up:
            parts.append([later - earlier for earlier, later in pairwise(times)])
            if time.perf_counter() - begin > ENOUGH:
                break
    before, transfer, after = (statistics.median(column) for column in zip(*parts, strict=True))
    return {
        f"{name}: transfer, s": transfer,
        f"{name}: {'wake weights' if asleep else 'pause'}, s": before,
        f"{name}: {'wake KV cache' if asleep else 'resume'}, s": after,
        f"{name}: pause, s": statistics.median(map(sum, parts)),
        f"{name}: GB/s of the transfer": size / transfer / 1e9,
        f"{name}: measurements": f"{len(parts)}, pauses {min(map(sum, parts)):.3f}-{max(map(sum, parts)):.3f} s",
    }


def _differing(what: str, one: dict[str, str], other: dict[str, str]) -> str:
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return f"{what} differ in {len(names)} of {len(one)} parameters, among them {names[:5]}"


# The proof


def prove(folder: Path) -> int:
    """Tensors that an engine writes directly, which it has compared with its checkpoint; its vocabulary is padded."""
    os.environ |= ENVIRONMENT
    config = small()
    config.vocab_size = 100
    save_hf(folder, config, initial_tensors(config, 1, torch.bfloat16))
    from vllm import LLM

    engine = LLM(
        str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=2**30,
        worker_extension_cls=SKYRL,
        weight_transfer_config={"backend": IPC_BACKEND},
    )
    (count,) = engine.collective_rpc(_written)
    engine.llm_engine.engine_core.shutdown()
    assert count, "the engine took its weights for others than the checkpoint's"
    return count


def _written(worker: Any) -> int:
    writer = worker.weight_transfer_engine.writer
    return 0 if writer is None else len(writer.layout.views)
