"""Samples, and their packing into micro batches."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from beam_rl.model.attention import context_index
from beam_rl.model.batch import PackedBatch
from beam_rl.trainer.replay import RoutesError, Routing, pack_routes


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
    local: Tensor | None
    """int64 [local]: positions of this rank's tokens among all T; None where it has all of them."""
    samples: list[tuple[int, int, int]]
    """(index in the caller's list, start among all T, length n) of each sample."""
    total: int
    """T."""


def check_sample(number: int, sequence: Sequence, first: Sequence, routing: Routing | None) -> None:
    """Raise ValueError where a sample's tensors do not fit together (packing would shift them silently).

    Args:
        first: the batch's first sample, whose field names all must have.
        routing: check the routes' shape, too (RoutesError).
    """
    tokens = len(sequence.tokens)
    if tokens < 2:
        raise ValueError(f"sample {number} has {tokens} tokens: a prediction needs two")
    if sequence.fields.keys() != first.fields.keys():
        raise ValueError(f"sample {number} has fields {sorted(sequence.fields)}, sample 0 has {sorted(first.fields)}")
    for name, values in (("loss_mask", sequence.loss_mask), *sequence.fields.items()):
        if values.shape != (tokens - 1,):
            raise ValueError(f"sample {number}: {name} has shape {tuple(values.shape)}, expected [{tokens - 1}]")
    if routing is not None:
        try:
            routing.check_shape(sequence.routes, sequence.captured, tokens)
        except RoutesError as error:
            raise RoutesError(f"sample {number}: {error}") from None


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
    routing: Routing | None = None,
    masked: bool = True,
    cp: tuple[int, int] = (1, 0),
    tp: int = 1,
    multiple: int = 1,
    device: torch.device | str = "cpu",
    record: bool = False,
) -> MicroBatch:
    """Pack the sequences at `indices`; none at all makes a micro batch of padding, which keeps ranks in step.

    Args:
        routing: carry the samples' routes, and refuse those that this model's router could not have chosen.
        masked: want predictions only where the loss mask is not 0; otherwise all of them.
        cp: (size, rank) of context parallelism; every sample is padded to a multiple of 2 x size.
        tp: size of tensor parallelism; the local tokens are padded to a multiple of it.
        multiple: of all tokens, to which they are padded.
        record: keep the routes used, in `batch.recorded`.
    """
    chosen = [sequences[i] for i in indices]
    ranks, rank = cp
    chunks = 2 * ranks if ranks > 1 else 1
    sizes = [len(s.tokens) for s in chosen]
    lengths = [-(-n // chunks) * chunks for n in sizes]
    step = math.lcm(chunks, ranks * tp, multiple)
    if spare := -sum(lengths) % step or (0 if lengths else step):
        lengths.append(spare)
    total = sum(lengths)
    starts = list(accumulate(lengths, initial=0))
    gaps = [length - n for n, length in zip(sizes, lengths, strict=False)]
    spare_tokens = total - starts[len(chosen)]

    tokens = _lay_out([s.tokens for s in chosen], gaps, spare_tokens, torch.int64)
    targets = tokens.roll(-1)  # what stands behind a sample's last token does not matter: its mask is 0
    after = [gap + 1 for gap in gaps]
    mask = _lay_out([s.loss_mask if masked else torch.ones(len(s.tokens) - 1) for s in chosen], after, spare_tokens)
    names = sequences[0].fields if sequences else ()
    fields = {name: _lay_out([s.fields[name] for s in chosen], after, spare_tokens) for name in names}

    routes = captured = None
    if routing is not None and chosen:
        padding: list[None] = [None] * (len(lengths) - len(chosen))
        routes, captured = pack_routes(
            [*(s.routes for s in chosen), *padding], [*(s.captured for s in chosen), *padding], lengths
        )
        if fault := routing.first_fault(routes, captured):
            member = bisect_right(starts, fault[0]) - 1
            raise RoutesError(f"sample {indices[member]}, token {fault[0] - starts[member]}: {fault[1]}")
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
        local=None if local is None else local.to(device),
        samples=list(zip(indices, starts, sizes, strict=False)),
        total=total,
    )


def _lay_out(values: Seq[Tensor], gaps: Seq[int], spare: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values end to end, each followed by its gap of zeros, and `spare` zeros behind all."""
    zeros = torch.zeros(max([*gaps, spare], default=0), dtype=dtype)
    pieces = [piece for value, gap in zip(values, gaps, strict=True) for piece in (value, zeros[:gap])]
    return torch.cat([*pieces, zeros[:spare]])


def unpack(values: Seq[Tensor], batches: Seq[MicroBatch], count: int) -> list[Tensor]:
    """Give per-micro-batch values [T, …] back to the samples: [n, …] each, in the caller's order."""
    out: list[Tensor] = [torch.empty(0)] * count
    for value, batch in zip(values, batches, strict=True):
        for index, start, length in batch.samples:
            out[index] = value[start : start + length]
    return out
