"""Run by `test_layouts.py` in two and in four processes: what must come out of every layout as it does of one."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from beam_rl.model.config import load_config
from beam_rl.trainer.engine import EngineConfig, OptimizerSettings, Parallel, Sequence, TrainerEngine

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed.param_and_grad_buffer import shard_buffer

LAYOUTS: dict[str, tuple[int, Parallel]] = {
    "tp2": (2, Parallel(tp=2, etp=2)),
    "tp2-ep2": (2, Parallel(tp=2, ep=2)),
    "pp2": (2, Parallel(pp=2)),
    "ep2": (2, Parallel(ep=2)),
    "cp2": (2, Parallel(cp=2)),
    "dp2": (2, Parallel()),
    "tp2-ep2-etp2": (4, Parallel(tp=2, ep=2, etp=2)),
    "pp2-ep2": (4, Parallel(pp=2, ep=2)),
    "ep2-cp2": (4, Parallel(ep=2, cp=2)),
}
"""Processes and sizes of each layout; what the sizes leave of the processes is data parallelism.

As Megatron lays them out, experts have data parallelism of their own: two ranks of `tp2-ep2` hold half of the experts
each, four of `tp2-ep2-etp2` half of half of them; `ep2-cp2` is the one in which both experts and everything else have
replicas (two and four).
"""
VARIANTS = {
    "packed": (60, None),
    "one sample a micro batch": (1, None),
    "packed, recomputed": (60, "full"),
    "one sample a micro batch, recomputed": (1, "full"),
}
"""Tokens of a micro batch (60 make four micro batches of the ten samples), and what is recomputed."""
SETTINGS = OptimizerSettings(lr=1e-3, weight_decay=0.1, eps=1e-5, warmup_steps=2, schedule="linear", total_steps=8)


def loss(
    logprobs: Tensor, fields: Mapping[str, Tensor], loss_mask: Tensor, entropy: Tensor | None
) -> tuple[Tensor, dict[str, Tensor | float]]:
    """A clipped policy gradient with its three per-token fields, as a token mean over 100 tokens."""
    ratio = (logprobs - fields["old_logprobs"]).exp()
    gain = torch.minimum(ratio * fields["advantages"], ratio.clamp(0.8, 1.28) * fields["advantages"])
    total = -(gain * fields["weight"] * loss_mask).sum() / 100
    return total, {"tokens": loss_mask.sum(), "ratio": ratio.detach().sum(), "entropy": entropy.sum()}  # type: ignore[union-attr]


def build(model: Path, parallel: Parallel, recompute: Any = None) -> TrainerEngine:
    """An engine on the checkpoint `model`, float32."""
    engine = TrainerEngine(
        EngineConfig(dtype="float32", parallel=parallel, optimizer=SETTINGS, recompute=recompute, micro_batch_tokens=60)
    )
    engine.build(load_config(model))
    engine.load_hf(model)
    return engine


def gradients(engine: TrainerEngine) -> dict[str, Tensor]:
    """Accumulated gradients under Hugging Face names, whole; the distributed optimizer leaves each rank its shard."""
    for chunk in engine.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shard = shard_buffer(bucket.grad_data, group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    parameters = [parameter for model in engine.models for parameter in model.parameters()]
    kept = [parameter.data.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    result = {name: tensor.clone() for name, tensor in engine.export()}
    for parameter, data in zip(parameters, kept, strict=True):
        parameter.data.copy_(data)
    return result


def mine(samples: list[Any]) -> list[Any]:
    """This data-parallel replica's share of the samples."""
    return samples[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]


def everyones(values: list[Tensor]) -> list[Tensor]:
    """The replicas' values, in the order of all samples."""
    group = parallel_state.get_data_parallel_group()
    shares: list[Any] = [None] * group.size()
    dist.all_gather_object(shares, values, group=group)
    result: list[Any] = [None] * sum(len(share) for share in shares)
    for rank, share in enumerate(shares):
        result[rank :: group.size()] = share
    return result


def values(engine: TrainerEngine, samples: list[Sequence]) -> dict[str, Any]:
    """Log-probs, entropies, routes used, the loss's metrics and its gradients."""
    scores = engine.score(mine(samples), entropy=True, routes=True)
    assert scores.entropies is not None
    assert scores.routes is not None
    metrics = engine.forward_backward(mine(samples), loss, entropy=True)
    found = gradients(engine)
    engine.zero_grad()
    return {
        "logprobs": everyones(scores.logprobs),
        "entropies": everyones(scores.entropies),
        "routes": everyones(scores.routes),
        "metrics": metrics,
        "gradients": found,
    }


def train(engine: TrainerEngine, samples: list[Sequence], steps: int) -> list[tuple[float, float]]:
    """Loss and norm of the gradient of each step."""
    result = []
    for _ in range(steps):
        metrics = engine.forward_backward(mine(samples), loss, entropy=True)
        result.append((metrics["loss"], engine.optimizer_step()["grad_norm"]))
    return result


def weights(engine: TrainerEngine) -> dict[str, Tensor]:
    """A copy of all weights."""
    return {name: tensor.clone() for name, tensor in engine.export()}


def dual_clip(
    engine: TrainerEngine, samples: list[Sequence], *, replay: bool = True
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and gradients of the worker's loss; its token mean counts the tokens of all replicas."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.train.config.config import AlgorithmConfig

    from beam_rl.trainer.worker import BeamPolicyWorkerBase

    worker = BeamPolicyWorkerBase.__new__(BeamPolicyWorkerBase)
    algorithm = AlgorithmConfig(
        policy_loss_type="dual_clip", eps_clip_low=0.2, eps_clip_high=0.28, clip_ratio_c=3.0, use_kl_loss=True
    )
    worker.cfg = SimpleNamespace(algorithm=algorithm)
    worker.policy_loss_fn = PolicyLossRegistry.get("dual_clip")
    share = mine(samples)
    tokens = worker.global_tokens(share)
    spread = [replace(s, fields=s.fields | {"advantages": s.fields["advantages"] / tokens}) for s in share]
    metrics = engine.forward_backward(spread, partial(worker.loss, tokens=tokens), replay=replay, entropy=True)
    found = gradients(engine)
    engine.zero_grad()
    return metrics, found


def resume(parallel: Parallel, folder: Path, name: str, samples: list[Sequence]) -> dict[str, Any]:
    """Go on from one process's checkpoint, save in this layout, and go on from that: steps and weights of both."""
    engine = build(folder / "model", parallel)
    extra = engine.load(folder / "one" / "step_2")
    engine.save(folder / name / "step_2", extra, asynchronous=True)
    steps = train(engine, samples, 2)  # while the files are being written
    reached = weights(engine)
    assert not (folder / name / "step_2").exists()
    engine.finalize_saves()
    again = build(folder / "model", parallel)
    assert again.load(folder / name / "step_2") == extra
    repeated = train(again, samples, 2)
    exact = repeated == steps and all(torch.equal(tensor, reached[key]) for key, tensor in weights(again).items())
    return {"steps": steps, "weights": reached, "exact": exact, "extra": extra}


def check(name: str, folder: Path) -> dict[str, Any]:
    """All that one layout has to show."""
    parallel = LAYOUTS[name][1]
    samples = torch.load(folder / "samples.pt", weights_only=False)
    report: dict[str, Any] = {}
    for recompute in (None, "full"):
        engine = build(folder / "model", parallel, recompute)
        for variant, (budget, recomputed) in VARIANTS.items():
            if recomputed == recompute:
                engine.config = replace(engine.config, micro_batch_tokens=budget)
                report[variant] = values(engine, samples)
    report["dual clip"] = dual_clip(engine, samples)
    report["resume"] = resume(parallel, folder, name, samples)
    return report


def main(folder: Path, rank: int, count: int) -> None:
    """Every layout of `count` processes, one after the other; a report of each, once it is done."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/{count}.store", rank=rank, world_size=count)
    for name, (processes, _) in LAYOUTS.items():
        if processes == count:
            report = check(name, folder)
            if rank == 0:
                torch.save(report, folder / f"{name}.pt")
            print(f"{name}: done, {time.process_time():.1f} s of CPU", flush=True)
            parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
