"""Scores of given rollouts under a checkpoint, with the rollout's routes and with the router's own."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from beam_rl.model.checkpoint import save_hf
from beam_rl.model.config import load_config
from beam_rl.model.lora import adapter_parameters
from beam_rl.trainer.engine import EngineConfig, Sequence, TrainerEngine


@dataclass
class Scored:
    """One sample's scores; arrays are numpy's, to travel between processes."""

    replayed: NDArray[np.float32]
    """[n - prompt]: log-probs of the response's tokens under the rollout's routes (R3); the free ones without any."""
    free: NDArray[np.float32]
    """[n - prompt]: with the router's own choice."""
    routes: NDArray[np.int16]
    """[n, layers, topk]: the router's own choice; -1 in dense layers."""
    hidden: NDArray[np.float32] | None = None
    """[layers, n - 1, hidden]: output of every layer under the rollout's routes, where it was asked for."""


def score_responses(
    model: str | Path,
    tokens: Seq[NDArray[np.int64]],
    prompts: Seq[int],
    routes: Seq[NDArray[Any] | None],
    config: EngineConfig,
    *,
    adapter: str | Path | None = None,
    hidden: int = 0,
) -> list[Scored]:
    """Score every sample twice: with its routes replayed, and without.

    Args:
        model: checkpoint folder.
        tokens: [n] a sample, prompt and response.
        prompts: tokens of each sample's prompt.
        routes: [n - 1, layers, topk] a sample, or None where the rollout has none.
        config: the engine's; its optimizer is ignored.
        adapter: a PEFT adapter's folder.
        hidden: of how many samples, the first ones, to keep the layers' outputs.
    """
    engine = open_engine(model, config, adapter)
    compact = [
        None if r is None else torch.from_numpy(r.astype(np.int16) if r.dtype != np.uint8 else r) for r in routes
    ]
    samples = [
        Sequence(tokens=torch.from_numpy(t), loss_mask=torch.ones(len(t) - 1), routes=r)
        for t, r in zip(tokens, compact, strict=True)
    ]
    replays = all(r is not None for r in compact)
    free = engine.score(samples, replay=False, routes=True)
    replayed = engine.score(samples, replay=True) if replays else free
    assert free.routes is not None
    scored = [
        Scored(
            replayed=replayed.logprobs[i][prompt - 1 :].numpy(),
            free=free.logprobs[i][prompt - 1 :].numpy(),
            routes=free.routes[i].numpy(),
        )
        for i, prompt in enumerate(prompts)
    ]
    for sample, each in zip(samples[:hidden], scored, strict=False):
        each.hidden = _hidden(engine, sample, replays)
    return scored


def open_engine(model: str | Path, config: EngineConfig, adapter: str | Path | None) -> TrainerEngine:
    """An engine for forward passes with a checkpoint's weights, and an adapter's if there is one."""
    engine = TrainerEngine(replace(config, optimizer=None))
    engine.build(load_config(model))
    engine.load_hf(model)
    if adapter is not None:
        engine.load_adapter(adapter)
    return engine


def _hidden(engine: TrainerEngine, sample: Sequence, replay: bool) -> NDArray[np.float32]:
    """Outputs of all layers for one sample, without its last token: [layers, n - 1, hidden]."""
    kept: list[torch.Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        kept.append((output[0] if isinstance(output, tuple) else output).detach().float().cpu()[:, 0])

    hooks = [layer.register_forward_hook(keep) for layer in engine.models[0].decoder.layers]
    try:
        engine.score([sample], replay=replay)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(kept).numpy()[:, : len(sample.tokens) - 1]


def make_adapter(model: str | Path, config: EngineConfig, folder: str | Path) -> float:
    """Write a PEFT adapter with random values in both matrices; returns the norm of its change by the weights' norm."""
    engine = open_engine(model, config, None)
    generator = torch.Generator().manual_seed(config.seed)
    before = {name: tensor.clone() for name, tensor in engine.export()}
    with torch.no_grad():
        for parameter in adapter_parameters(engine.models):
            if not parameter.any():  # B starts as zeros
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    engine.save_adapter(folder)
    squares = [
        (float((tensor.float() - before[name].float()).square().sum()), float(before[name].float().square().sum()))
        for name, tensor in engine.export()
    ]
    changed = [(change, weight) for change, weight in squares if change]
    return (sum(change for change, _ in changed) / sum(weight for _, weight in changed)) ** 0.5


def write_served(model: str | Path, config: EngineConfig, adapter: str | Path | None, folder: str | Path) -> None:
    """Write the checkpoint as the rollout gets it: with an adapter merged, or with weights rounded to MXFP8's values.

    Where MXFP8 is not of weights only, the rollout rounds them itself, and there is nothing to write.
    """
    engine = open_engine(model, config, adapter)
    save_hf(Path(folder), engine.hf, engine.rollout_weights(), copy_from=Path(model))
