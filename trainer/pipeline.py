"""Micro batches on their way through the model and back: what Megatron's pipeline schedule is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from beam_rl.trainer import cpu
from beam_rl.trainer.outputs import LossFn
from beam_rl.trainer.sequences import MicroBatch


def run(
    chunks: list[Any],
    batches: Seq[MicroBatch],
    finish: Callable[[MicroBatch, Tensor], Any],
    *,
    temperature: float,
    backward: bool = False,
) -> list[Any]:
    """Megatron's schedule over micro batches; `finish` turns the last stage's scores [2, K] into outputs.

    Args:
        chunks: the model's part on this rank, as Megatron's list of one.
        temperature: of the softmax.
        backward: also run the backward passes; `finish` then gives what `loss` gives.

    Returns:
        the outputs on the last pipeline stage, and nothing on the others.
    """

    def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(batches)
        with cpu.without_mode():
            output = model(
                batch.tokens,
                packed_seq_params=batch.batch,
                rows=batch.rows,
                targets=batch.targets,
                temperature=temperature,
            )
        return output, partial(finish_step, batch)

    def finish_step(batch: MicroBatch, output: Tensor, non_loss_data: bool = False) -> Any:
        with cpu.without_mode():
            return finish(batch, output[0])

    with cpu.cuda_as_cpu():
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in chunks],
            model=chunks,
            num_microbatches=len(batches),
            seq_length=max(batch.total for batch in batches),
            micro_batch_size=1,
            forward_only=not backward,
            collect_non_loss_data=not backward,
        )


def loss(
    batch: MicroBatch, scores: Tensor, loss_fn: LossFn, entropy: bool
) -> tuple[Tensor, Tensor, dict[str, Tensor | float]]:
    """Megatron's triple of loss, token count and outputs; a count of 0 keeps it from dividing the gradients.

    Args:
        scores: log-probabilities and entropies [2, K].
        entropy: give the entropies to `loss_fn`.
    """
    logprobs, entropies = scores
    value, metrics = loss_fn(logprobs, batch.fields, batch.loss_mask, entropies.detach() if entropy else None)
    if len(batch.rows) == 0:
        value = value + logprobs.sum()  # nothing to learn, but the backward pass of every rank must run
    count = torch.zeros((), dtype=torch.int, device=value.device)
    return value, count, {"loss": value.detach(), **metrics}


def finalize(model: Any, num_tokens: Tensor | None = None, **arguments: Any) -> None:
    """Megatron's last reductions of the gradients, without a division by the token count, which `loss` leaves at 0."""
    finalize_model_grads(model, None, **arguments)
