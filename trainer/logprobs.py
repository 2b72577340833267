"""Log-probabilities and entropies from logits that may be split over the vocabulary (tensor parallelism)."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from beam_rl.model import numerics

_ROWS = 4096
"""Rows of [rows, vocabulary] float32 that the entropy holds at once."""


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Log-probabilities, float32 [tokens], of targets [tokens]; logits float32 [tokens, vocabulary / tp]."""
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return numerics.token_logprobs(logits, targets, temperature)
    scaled = logits / temperature if temperature != 1.0 else logits.clone()  # the kernel writes into its input
    return -vocab_parallel_cross_entropy(scaled[:, None], targets[:, None])[:, 0]


@torch.no_grad()
def entropies(logits: Tensor, temperature: float) -> Tensor:
    """Entropies, float32 [tokens] (nats), of softmax(logits / temperature); a measure, without gradient."""
    parts = [_entropies(part / temperature) for part in logits.split(_ROWS)]
    return torch.cat(parts) if parts else logits.new_zeros(0)


def _entropies(logits: Tensor) -> Tensor:
    group = parallel_state.get_tensor_model_parallel_group()
    top = logits.amax(-1)
    torch.distributed.all_reduce(top, op=torch.distributed.ReduceOp.MAX, group=group)
    shifted = logits - top[:, None]
    weights = shifted.exp()
    sums = torch.stack((weights.sum(-1), (weights * shifted).sum(-1)))  # [2, tokens]: Σ e^x and Σ x e^x
    torch.distributed.all_reduce(sums, group=group)
    return sums[0].log() - sums[1] / sums[0]
