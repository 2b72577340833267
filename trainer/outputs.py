"""What comes out of the micro batches, and its way back to every rank."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from beam_rl.model.config import BeamConfig
from beam_rl.trainer import distributed
from beam_rl.trainer.sequences import MicroBatch


class LossFn(Protocol):
    """A loss over the K tokens of a micro batch whose loss mask is not 0."""

    def __call__(
        self, logprobs: Tensor, fields: Mapping[str, Tensor], loss_mask: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Loss and metrics of a micro batch, both SUMS over its tokens.

        The engine adds them over micro batches and ranks and divides by nothing: a token mean over the global batch is
        a sum whose terms the caller has divided by the global number of tokens. So neither the loss nor the gradient
        depends on how the batch was split, packed or padded.

        Args:
            logprobs: float32 [K], with gradient.
            fields: float32 [K] each: the samples' fields.
            loss_mask: float32 [K], none of them 0.
            entropy: float32 [K] without gradient, if it was asked for.
        """
        ...


@dataclass
class Scores:
    """Results of a forward pass, one tensor a sample, on the CPU."""

    logprobs: list[Tensor]
    """float32 [n - 1]: entry t is of token t + 1."""
    entropies: list[Tensor] | None
    """float32 [n - 1], in nats."""
    routes: list[Tensor] | None
    """int16 [n, layers, topk]: the experts used; -1 in dense layers."""


def gather(batches: Seq[MicroBatch], results: Seq[Tensor]) -> list[Tensor]:
    """Bring scores [2, K] of the context-parallel ranks together as [2, T] a micro batch, on the CPU of every rank.

    Args:
        results: of the last pipeline stage; other stages have none.
    """
    pipeline, context = parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_context_parallel_group()
    gathered = []
    for i, batch in enumerate(batches):
        whole = torch.zeros(2, batch.total, device=batch.tokens.device)
        if parallel_state.is_pipeline_last_stage():
            whole[:, batch.places] = results[i]
            if context.size() > 1:
                dist.all_reduce(whole, group=context)
        if pipeline.size() > 1:
            dist.broadcast(whole, parallel_state.get_pipeline_model_parallel_last_rank(), group=pipeline)
        gathered.append(whole.cpu())
    return gathered


def gather_routes(batches: Seq[MicroBatch], hf: BeamConfig) -> list[Tensor]:
    """Routes used, int16 [T, layers, topk] a micro batch, of all layers and context-parallel ranks, on the CPU."""
    groups = parallel_state.get_context_parallel_group(), parallel_state.get_pipeline_model_parallel_group()
    gathered = []
    for batch in batches:
        shape = (batch.total, hf.num_hidden_layers, hf.num_experts_per_tok)
        whole = torch.full(shape, -1, dtype=torch.int32, device=batch.tokens.device)
        where = slice(None) if batch.local is None else batch.local
        for layer, ids in batch.batch.recorded.items():
            whole[where, layer] = ids.int()
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
        gathered.append(whole.to(torch.int16).cpu())
    return gathered


def sum_metrics(results: Seq[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Sum the last stage's metrics over micro batches and replicas; every rank gets them."""
    sums: list[Any] = [None]
    if parallel_state.is_pipeline_last_stage():
        names = list(results[0])
        rows = [[float(result[name]) for name in names] for result in results]
        total = torch.tensor(rows, dtype=torch.float64, device=distributed.device()).sum(0)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        sums = [dict(zip(names, total.tolist(), strict=True))]
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    if pipeline.size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(sums, last, group=pipeline)
    return sums[0]
