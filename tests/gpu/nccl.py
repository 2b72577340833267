"""As `sync`, over NCCL, from a trainer on one GPU to an engine on another, which pauses and does not sleep."""

from typing import Any

import torch

from beam_rl.rollout.transfer import NCCL_BACKEND
from tests.gpu.checks import Checks
from tests.gpu.engines import Tell
from tests.gpu.serving import Receiver, Server
from tests.gpu.sync import TRUST, exchange, exchanges, measured, randomise, replaced, same_weights, sender

DIRECT, RELOAD = "direct", "vLLM's reload"
RECEIVERS = {
    DIRECT: Receiver(NCCL_BACKEND, TRUST, gpu=1),
    RELOAD: Receiver(NCCL_BACKEND, gpu=1),  # SkyRL's own would wait for ever in its second update
}


def run(report: Tell) -> None:
    if torch.cuda.device_count() < 2:
        report("not run", "it needs two GPUs")
        return
    checks = Checks()
    exchanges(report, RECEIVERS, send, DIRECT, checks)
    checks.done()


def send(tell: Tell, engine: Any, servers: dict[str, Server], size: int, checks: Checks) -> None:
    """Pauses, and the same weights in both engines."""
    direct, reload = servers[DIRECT], servers[RELOAD]
    randomise(engine, 1)
    with checks.attempt(DIRECT):
        whole = sender(engine, direct, "nccl", fused=True)
        measured(tell, DIRECT, direct, whole, size, asleep=False)
        first, said = direct.digests(), direct.greedy()
        randomise(engine, 2)
        exchange(direct, whole, asleep=False)
        replaced(direct, first, said, checks)
        tell(f"{DIRECT}: weights A and B", f"{len(first)} digests compared")
    with checks.attempt(RELOAD):
        measured(tell, RELOAD, reload, sender(engine, reload, "nccl"), size, asleep=False)
        checks.expect(*same_weights("direct and reloaded weights", direct.digests(), reload.digests()))
