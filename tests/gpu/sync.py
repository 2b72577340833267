"""Weights from a trainer to rollout engines on the same GPU, 7.2 B of them: seconds of pause, and whether all arrive.

A pause is what SkyRL does between training and the next rollout: the engine, asleep, takes its weights' memory back,
gets the new weights, and takes its KV cache's memory back. `nccl` is for a trainer on another GPU.
"""

import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from beam_rl import apart
from beam_rl.eval_server import free_ports
from beam_rl.model.checkpoint import save_hf
from beam_rl.model.tensors import initial_tensors
from beam_rl.rollout.offline import offline_engine
from beam_rl.rollout.transfer import BACKEND, IPC_BACKEND
from tests.gpu.checks import Checks
from tests.gpu.engines import ENVIRONMENT, Tell, streamed
from tests.gpu.models import SKYRL, large, small
from tests.gpu.serving import Receiver, Server, serving

REPETITIONS, WARM_UP = 3, 1
ENOUGH = 8.0
"""Seconds of a case after which it is not repeated any more."""
PAUSE = 1.0
"""Most seconds that a pause may take."""
TRUST = {"beam_trust_layout": True}
"""The servers have dummy weights, which prove nothing; the proof has an engine of its own."""
BUFFER = 2**30
"""Bytes of the packed buffer, as SkyRL has it for this model."""

RELOAD, DIRECT, FILE = "CUDA IPC, vLLM's reload", "CUDA IPC, direct", "shared memory"
RECEIVERS = {
    DIRECT: Receiver(IPC_BACKEND, TRUST),
    RELOAD: Receiver("skyrl_ipc"),
    FILE: Receiver(BACKEND),
}


def run(report: Tell) -> None:
    checks = Checks()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(1) as pool:
        proof = pool.submit(apart.call, prove, Path(temporary) / "small")
        exchanges(report, RECEIVERS, on_one_gpu, DIRECT, checks)
        with checks.attempt("proof"):
            report("proof against a checkpoint: tensors written directly", proof.result())
    checks.done()


def exchanges(
    report: Tell, receivers: dict[str, Receiver], send: Callable[..., None], direct: str, checks: Checks
) -> None:
    """Start servers with these receivers, and let a trainer on the first GPU `send` to them.

    Args:
        send: called as `send(tell, engine, servers, bytes of its weights, checks)`, in a process of its own.
        direct: the server that must write directly.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        large().save_pretrained(folder / "model")
        with serving(folder / "model", receivers) as servers:
            failed = streamed(trainer, (servers, send), report, folder)
            checks.expect(failed is None, str(failed))
            log = servers[direct].log.read_text(errors="replace")
            checks.expect("written directly" in log, f"{direct}: the engine did not write directly:\n{log[-4000:]}")


# The trainer's process


def trainer(tell: Tell, servers: dict[str, Server], send: Callable[..., None]) -> None:
    """An engine without an optimizer, which sends. Raises AssertionError with all that is wrong."""
    from beam_rl.trainer.engine import EngineConfig, TrainerEngine

    engine = TrainerEngine(EngineConfig(optimizer=None))
    engine.build(large())
    described = [tensor for _, tensor in engine.rollout_description()]
    size = sum(t.nbytes for t in described)
    tell("trainer: parameters, billions", sum(t.numel() for t in described) / 1e9)
    tell("trainer: bytes of weights, GB", size / 1e9)
    checks = Checks()
    for name, server in servers.items():
        with checks.attempt(name):
            tell(f"{name}: seconds to start, at most", server.wait())
    send(tell, engine, servers, size, checks)
    checks.done()


def on_one_gpu(tell: Tell, engine: Any, servers: dict[str, Server], size: int, checks: Checks) -> None:
    """CUDA IPC and files: pauses, and the same weights in all engines."""
    direct, reload, file = (servers[name] for name in (DIRECT, RELOAD, FILE))
    randomise(engine, 1)
    with checks.attempt(DIRECT):
        whole = sender(engine, direct, "ipc", fused=True)
        pause = measured(tell, DIRECT, direct, whole, size)
        checks.expect(pause <= PAUSE, f"{DIRECT}: a pause of {pause:.2f} s is longer than {PAUSE} s")
    with checks.attempt(RELOAD):
        measured(tell, RELOAD, reload, sender(engine, reload, "ipc"), size)
        checks.expect(*same_weights("direct and reloaded weights", direct.digests(), reload.digests()))
        same = sum(map(int.__eq__, direct.greedy(), reload.greedy()))
        tell(f"{DIRECT}: greedy tokens equal to the reload's, of 16", same)
    with checks.attempt("weights A, B and A again"):
        first, said = direct.digests(), direct.greedy()
        randomise(engine, 2)
        measured(tell, f"{DIRECT}, expert by expert", direct, sender(engine, direct, "ipc"), size)
        replaced(direct, first, said, checks)
        randomise(engine, 1)
        exchange(direct, whole)
        checks.expect(*same_weights("the same weights, sent twice,", first, direct.digests()))
        checks.expect(direct.greedy() == said, "the same weights give other tokens")
        tell(f"{DIRECT}: weights A, B and A again", f"{len(first)} digests compared")
    with checks.attempt(FILE):
        measured(tell, FILE, file, file_sender(engine, file), size, warm_up=0, repetitions=1)
        checks.expect(*same_weights("direct weights and those of a file", direct.digests(), file.digests()))


@torch.no_grad()
def randomise(engine: Any, seed: int) -> None:
    """Weights that are others for another seed."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for parameter in engine.models[0].parameters():
        parameter.normal_(0, 0.02, generator=generator)
        if parameter.dim() == 1:
            parameter.add_(1)
    torch.cuda.synchronize()


# Sending


class Clocked:
    """A control plane that adds up the seconds of each kind of call."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.seconds: dict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds[name] += time.perf_counter() - begin

        return timed


@dataclass(frozen=True)
class Sender:
    """A trainer's sending half."""

    send: Callable[[], None]
    client: Clocked


def sender(engine: Any, server: Server, kind: str, *, fused: bool = False) -> Sender:
    """SkyRL's, as `build_trainer_engine` sets it up."""
    from skyrl.backends.skyrl_train.weight_sync import weight_senders
    from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient, nccl_init_payloads
    from skyrl.backends.skyrl_train.weight_sync.register import register_trainer_engines
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from beam_rl.trainer.weights import EngineWeights

    register_trainer_engines()
    common = {"packed": True, "packed_buffer_size_bytes": BUFFER, "rank": 0}
    if kind == "ipc":
        info = weight_senders.get_skyrl_ipc_trainer()[0](**common)
        client = Clocked(SkyrlWeightSyncClient([server.url]))
    else:
        (port,) = free_ports(1)
        place = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
        info = weight_senders.get_skyrl_nccl_trainer()[0](**place, **common)
        client = Clocked(SkyrlWeightSyncClient([server.url], init_payload_fn=nccl_init_payloads))
    source = EngineWeights(engine, fused_experts=fused)
    return Sender(WeightTransferTrainerFactory.trainer_init(info, client=client, source=source).send_weights, client)


def file_sender(engine: Any, server: Server) -> Sender:
    """This project's, for files."""
    from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient

    from beam_rl.rollout.transfer import ShmTrainer, ShmTrainerInit
    from beam_rl.workers import ExportedWeights

    room = os.statvfs("/dev/shm")
    directory = "/dev/shm" if room.f_bavail * room.f_frsize > 20e9 else tempfile.gettempdir()
    client: Any = Clocked(SkyrlWeightSyncClient([server.url]))
    init = ShmTrainerInit(rank=0, directory=directory)
    return Sender(ShmTrainer.trainer_init(init, client=client, source=ExportedWeights(engine)).send_weights, client)


def exchange(server: Server, half: Sender, *, asleep: bool = True) -> dict[str, float]:
    """Seconds of one pause and its parts. No KV of the old weights is left in the server's prefix cache."""
    times: dict[str, float] = {}

    def step(name: str, act: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        act()
        times[name] = time.perf_counter() - begin

    half.client.seconds.clear()
    if asleep:
        step("sleep (no part of the pause)", lambda: server.post("/sleep?level=2"))
    before, after = ("wake weights", "wake KV cache") if asleep else ("stop", "resume")
    step(before, lambda: server.post("/wake_up?tags=weights" if asleep else "/pause?mode=keep&clear_cache=true"))
    step("transfer", half.send)
    step(after, lambda: server.post("/wake_up?tags=kv_cache" if asleep else "/resume"))
    calls = half.client.seconds
    steps = ("start_weight_update", "update_weights", "finish_weight_update")
    return {
        "pause": times[before] + times["transfer"] + times[after],
        **times,
        **{f"transfer, of it {name}": calls[name] for name in steps},
        "transfer, of it the trainer's own": times["transfer"] - sum(calls.values()),
    }


def measured(
    tell: Tell,
    name: str,
    server: Server,
    half: Sender,
    size: int,
    *,
    asleep: bool = True,
    warm_up: int = WARM_UP,
    repetitions: int = REPETITIONS,
) -> float:
    """Tell the medians of a pause and its parts; returns the pause's, in seconds."""
    begin = time.perf_counter()
    found: list[dict[str, float]] = []
    for repetition in range(warm_up + repetitions):
        parts = exchange(server, half, asleep=asleep)
        if repetition >= warm_up:
            found.append(parts)
            if time.perf_counter() - begin > ENOUGH:
                break
    medians = {part: statistics.median(each[part] for each in found) for part in found[0]}
    for part, seconds in medians.items():
        tell(f"{name}: {part}, s", seconds)
    pauses = [each["pause"] for each in found]
    tell(f"{name}: GB/s of the transfer", size / medians["transfer"] / 1e9)
    tell(f"{name}: measurements", f"{len(pauses)}, pauses {min(pauses):.3f}-{max(pauses):.3f} s")
    return medians["pause"]


# Checking


def replaced(server: Server, old: dict[str, str], said: list[int], checks: Checks) -> None:
    """Every parameter is another one than before, but for the routers' biases, and the server speaks otherwise."""
    new = server.digests()
    kept = [name for name in old if old[name] == new[name] and not name.endswith("correction_bias")]
    checks.expect(not kept, f"{len(kept)} parameters did not change, among them {kept[:3]}")
    checks.expect(server.greedy() != said, "the engine goes on with its old weights")


def same_weights(what: str, one: dict[str, str], other: dict[str, str]) -> tuple[bool, str]:
    """Whether all digests are the same, and what is to be said if not."""
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return not names, f"{what} differ in {len(names)} of {len(one)} parameters, among them {names[:5]}"


# The proof


def prove(folder: Path) -> int:
    """Tensors that an engine writes directly, which it has compared with its checkpoint; its vocabulary is padded."""
    os.environ |= ENVIRONMENT
    config = small()
    config.vocab_size = 100
    save_hf(folder, config, initial_tensors(config, 1, torch.bfloat16))
    room = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**30}
    receiver = {"worker_extension_cls": SKYRL, "weight_transfer_config": {"backend": IPC_BACKEND}}
    with offline_engine(folder, "bfloat16", 512, capture=False, **room, **receiver) as engine:
        (count,) = engine.collective_rpc(_written)
    assert count, "the engine took its weights for others than the checkpoint's"
    return count


def _written(worker: Any) -> int:
    writer = worker.weight_transfer_engine.writer
    return 0 if writer is None else len(writer.layout.views)
