"""CUDA graphs of the trainer's decoder: the same gradients as without, for micro batches of several shapes."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from beam_rl.model.lora_config import LoraConfig
from beam_rl.trainer.engine import EngineConfig, Sequence, TrainerEngine
from tests.gpu.checks import Checks
from tests.gpu.engines import ENVIRONMENT
from tests.gpu.models import small

LENGTHS = (300, 17, 129, 500, 256, 2, 90, 333, 64, 410)
PRECISIONS: dict[str, dict[str, Any]] = {"bf16": {}, "lora": {"lora": LoraConfig()}}
NOISE = 2e-2
"""Of a gradient's norm. FlashAttention adds dQ in any order, so that two runs without graphs differ, too: not at all,
or by up to 0.006 seen on an H200."""


def run(report: Callable[[str, Any], None]) -> None:
    checks = Checks()
    for name, settings in PRECISIONS.items():
        with checks.attempt(name):
            compare(name, settings, report, checks)
    with checks.attempt("two replicas"):
        replicas(report, checks)
    checks.done()


def build(settings: dict[str, Any]) -> tuple[TrainerEngine, list[Sequence]]:
    """An engine with graphs, and samples."""
    engine = TrainerEngine(EngineConfig(**settings, cuda_graphs=True, micro_batch_tokens=1024))
    engine.build(small())
    generator = torch.Generator().manual_seed(0)
    return engine, [
        Sequence(tokens=torch.randint(0, 64, (n,), generator=generator), loss_mask=torch.ones(n - 1)) for n in LENGTHS
    ]


def compare(name: str, settings: dict[str, Any], report: Callable[[str, Any], None], checks: Checks) -> None:
    """Gradients of the same samples, first without graphs, then while they are captured, and replayed."""
    engine, samples = build(settings)
    graphs = engine._graphs
    assert graphs is not None
    routes = engine.score(samples, replay=False, routes=True).routes
    assert routes is not None
    replayed = [replace(sample, routes=each.to(torch.int16)) for sample, each in zip(samples, routes, strict=True)]
    missing = [replace(sample, captured=torch.arange(len(sample.routes)) % 2 == 0) for sample in replayed]  # type: ignore[arg-type]
    kinds = {"own routes": (samples, False), "R3": (replayed, True), "R3, half of the routes": (missing, True)}
    for kind, (given, replay) in kinds.items():
        plain = gradients(engine, given, replay)
        graphs.clear()
        noise = apart(gradients(engine, given, replay), plain)
        report(f"{name}, {kind}: largest difference of two runs without, of a gradient's norm", noise)
        for when in ("captured", "replayed"):
            difference = apart(gradients(engine, given, replay), plain)
            report(f"{name}, {kind}, {when}: largest difference", difference)
            checks.expect(difference < NOISE, f"{name}, {kind}, {when}: gradients differ by {difference}")
    engine.offload()
    engine.backload()
    for when in ("moved", "captured again", "replayed again"):
        difference = apart(gradients(engine, missing, True), plain)
        checks.expect(difference < NOISE, f"{name}, {when}: gradients differ by {difference}")
    made = len(graphs._graphs)
    report(f"{name}: graphs", f"{made} of {len(graphs._seen)} shapes")
    checks.expect(made >= 3, f"{name}: {made} graphs were captured")
    memory(name, engine, report, checks)


def memory(name: str, engine: TrainerEngine, report: Callable[[str, Any], None], checks: Checks) -> None:
    """Graphs share the memory of their activations: four take little more than the first, the largest."""
    held = []
    for tokens in (8192, 7168, 6144, 5120):
        sample = Sequence(tokens=torch.zeros(tokens, dtype=torch.int64), loss_mask=torch.ones(tokens - 1))
        for _ in range(2):
            gradients(engine, [sample], False)
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    report(f"{name}: GB held after graphs for 8, 7, 6 and 5 k tokens", " ".join(f"{size / 1e9:.2f}" for size in held))
    checks.expect(held[-1] < 1.3 * held[0], f"{name}: graphs hold {held} bytes")


def replicas(report: Callable[[str, Any], None], checks: Checks) -> None:
    """The same over two GPUs, each with half of the samples, whose gradients are reduced over both."""
    if torch.cuda.device_count() < 2:
        report("two replicas", "not run: they need two GPUs")
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn(replica, (folder,), nprocs=2)
        for rank in range(2):
            difference = float(Path(folder, str(rank)).read_text())
            report(f"two replicas, rank {rank}: largest difference", difference)
            checks.expect(difference < NOISE, f"two replicas, rank {rank}: gradients differ by {difference}")


def replica(rank: int, folder: str) -> None:
    """One of them: writes the largest difference to a file."""
    os.environ |= ENVIRONMENT
    torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=rank, world_size=2)
    engine, samples = build({})
    plain, *others = [gradients(engine, samples[rank::2], False) for _ in range(4)]
    assert engine._graphs is not None
    assert engine._graphs._graphs
    Path(folder, str(rank)).write_text(str(max(apart(other, plain) for other in others)))
    torch.distributed.destroy_process_group()


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of a parameter's gradients, of their norm."""
    return max(float((one[name] - grad).norm() / (grad.norm() + 1e-12)) for name, grad in other.items())


def gradients(engine: TrainerEngine, samples: list[Sequence], replay: bool) -> dict[str, Tensor]:
    """Of the sum of all log-probabilities, by parameter."""
    engine.forward_backward(samples, lambda logprobs, *_: (-logprobs.sum() / 1000, {}), replay=replay)
    named = ((name, p) for model in engine.models for name, p in model.named_parameters() if p.requires_grad)
    found = {name: parameter.main_grad.clone() for name, parameter in named}
    engine.zero_grad()
    return found
