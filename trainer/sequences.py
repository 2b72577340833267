"""Samples, and their packing into micro batches."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from beam_rl.model.attention import context_index
from beam_rl.model.batch import PackedBatch
from beam_rl.trainer.replay import pack_routes
from torch import Tensor


@dataclass
class Sequence:
    """One sample, prompt and response, without padding. Entry t of a per-token field is about token t + 1."""

    tokens: Tensor
    """int64 [n], n >= 2."""
    loss_mask: Tensor
    """float32 [n - 1]: 0 where the loss takes no interest in the prediction."""
    routes: Tensor | None = None
    """uint8 or int16 [n or n - 1, layers, topk]: the experts that the rollout used, by absolute layer."""
    captured: Tensor | None = None
    """bool, a row of `routes` each: False where the rollout's route is missing. None: all are there."""
    fields: dict[str, Tensor] = field(default_factory=dict)
    """float32 [n - 1] each, for the loss: advantages, old_logprobs, …"""


@dataclass
class MicroBatch:
    """Samples end to end: T tokens in all, `local` of them on this rank of the context-parallel group."""

    batch: PackedBatch
    tokens: Tensor
    """int64 [1, local]."""
    rows: Tensor
    """int64 [K]: local positions whose prediction is wanted."""
    targets: Tensor
    """int64 [K]: the token that each of those predicts."""
    loss_mask: Tensor
    """float32 [K]."""
    fields: dict[str, Tensor]
    """float32 [K] each."""
    places: Tensor
    """int64 [K]: positions of those rows among all T."""
    samples: list[tuple[int, int, int]]
    """(index in the caller's list, start among all T, length n) of each sample."""
    total: int
    """T."""


def split(sequences: Seq[Sequence], budget: int) -> list[list[int]]:
    """Indices of the sequences of each micro batch: in order, as many as fit the budget of tokens."""
    batches: list[list[int]] = []
    room = 0
    for index, sequence in enumerate(sequences):
        tokens = len(sequence.tokens)
        if not batches or tokens > room:
            batches.append([])
            room = budget
        batches[-1].append(index)
        room -= tokens
    return batches


def pack(
    sequences: Seq[Sequence],
    indices: Seq[int],
    *,
    replay: bool,
    masked: bool = True,
    cp: tuple[int, int] = (1, 0),
    tp: int = 1,
    device: torch.device | str = "cpu",
    record: bool = False,
) -> MicroBatch:
    """Pack the sequences at `indices`; none at all makes a micro batch of padding, which keeps ranks in step.

    Args:
        replay: carry the samples' routes.
        masked: want predictions only where the loss mask is not 0; otherwise all of them.
        cp: (size, rank) of context parallelism; every sample is padded to a multiple of 2 x size.
        tp: size of tensor parallelism; the local tokens are padded to a multiple of it.
        record: keep the routes used, in `batch.recorded`.
    """
    chosen = [sequences[i] for i in indices]
    ranks, rank = cp
    multiple = 2 * ranks if ranks > 1 else 1
    sizes = [len(s.tokens) for s in chosen]
    lengths = [-(-n // multiple) * multiple for n in sizes]
    step = max(multiple, ranks * tp)  # T and every sample a multiple of 2 cp, T / cp a multiple of tp
    while step % multiple:
        step += ranks * tp
    if spare := -sum(lengths) % step or (0 if lengths else step):
        lengths.append(spare)
    total = sum(lengths)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]

    tokens = torch.zeros(total, dtype=torch.int64)
    targets = torch.zeros(total, dtype=torch.int64)
    mask = torch.zeros(total)
    names = list(chosen[0].fields) if chosen else _field_names(sequences)
    fields = {name: torch.zeros(total) for name in names}
    for s, n, start in zip(chosen, sizes, starts, strict=False):
        tokens[start : start + n] = s.tokens
        targets[start : start + n - 1] = s.tokens[1:]
        mask[start : start + n - 1] = s.loss_mask if masked else 1.0
        for name, values in fields.items():
            values[start : start + n - 1] = s.fields[name]

    routes = captured = None
    if replay and chosen:
        padding: list[None] = [None] * (len(lengths) - len(chosen))
        routes, captured = pack_routes(
            [*(s.routes for s in chosen), *padding], [*(s.captured for s in chosen), *padding], lengths
        )
    local = None if ranks == 1 else context_index(tuple(lengths), ranks, rank)
    if local is not None:
        tokens, mask = tokens[local], mask[local]
        routes = routes[local] if routes is not None else None
        captured = captured[local] if captured is not None else None
    rows = mask.nonzero()[:, 0]
    places = rows if local is None else local[rows]
    batch = PackedBatch.from_lengths(
        lengths,
        device=device,
        routes=None if routes is None else routes.to(device),
        captured=None if captured is None else captured.to(device),
        record=record,
    )
    return MicroBatch(
        batch=batch,
        tokens=tokens[None].to(device),
        rows=rows.to(device),
        targets=targets[places].to(device),
        loss_mask=mask[rows].to(device),
        fields={name: values[places].to(device) for name, values in fields.items()},
        places=places.to(device),
        samples=list(zip(indices, starts, sizes, strict=False)),
        total=total,
    )


def _field_names(sequences: Seq[Sequence]) -> list[str]:
    return list(sequences[0].fields) if sequences else []


def unpack(values: Seq[Tensor], batches: Seq[MicroBatch], count: int) -> list[Tensor]:
    """Give per-micro-batch values [T] back to the samples: float32 [n - 1] each, in the caller's order."""
    out: list[Tensor] = [torch.empty(0)] * count
    for value, batch in zip(values, batches, strict=True):
        for index, start, length in batch.samples:
            out[index] = value[start : start + length - 1]
    return out
