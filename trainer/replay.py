"""Rollout Routing Replay (R3): the experts that a rollout used, checked, and packed with the tokens they belong to.

Routes stay compact (one or two bytes an id) from the rollout to the layer that widens them, and travel inside their
micro batch: there is no state outside it that a second micro batch, a recomputation, a forward-only pass or an
exception could leave behind.

Faults this module refuses, seen in public projects: missing or short routes (vllm#28284, miles#407), all-zero rows of
a backend that never captured (vllm#54730, vllm-ascend#16314), ids wrapped by a narrow type (verl#7880).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

CAPTURE_SETTING = "generator.inference_engine.enable_return_routed_experts"


class RoutesError(ValueError):
    """A rollout's routes cannot be replayed; the message names the sample and the setting at fault."""


def route_dtype(num_experts: int) -> torch.dtype:
    """Smallest integer type that holds every expert id: uint8 up to 256 experts, int16 above.

    Raises ValueError beyond int16.
    """
    if num_experts > 2**15:
        raise ValueError(f"routes are kept in two bytes an id, which do not hold {num_experts} experts")
    return torch.uint8 if num_experts <= 256 else torch.int16


@dataclass(frozen=True)
class Routing:
    """What the model expects of routes."""

    layers: int
    """All layers: routes have a place for dense ones too, which nobody reads."""
    sparse_layers: tuple[int, ...]
    topk: int
    experts: int

    def check_shape(self, routes: Tensor | None, captured: Tensor | None, tokens: int) -> None:
        """Raise `RoutesError` unless a sample's routes are there, one row a token.

        Args:
            routes: uint8 or int16 [rows, layers, topk]; rows == tokens, or tokens - 1 (the last was never an input).
            captured: bool [rows], False where the rollout has no route for the token; None means all are there.
            tokens: length of the sample, prompt and response.
        """
        if routes is None:
            raise RoutesError(f"no routes: R3 replays the rollout's, so set {CAPTURE_SETTING}=true, or beam.r3=false")
        if routes.dtype not in (torch.uint8, torch.int16):
            raise RoutesError(f"routes are {routes.dtype}: expected {route_dtype(self.experts)}")
        if routes.dim() != 3 or tuple(routes.shape[1:]) != (self.layers, self.topk):
            raise RoutesError(
                f"routes have shape {tuple(routes.shape)}: expected [{tokens}, {self.layers}, {self.topk}]"
            )
        rows = len(routes)
        if rows not in (tokens - 1, tokens):
            raise RoutesError(
                f"{rows} rows of routes for {tokens} tokens: expected {tokens - 1} (one an input token) or {tokens};"
                " a prefix-cache hit or an external KV cache drops rows, so check the rollout engine's cache settings"
            )
        if captured is not None and captured.shape != (rows,):
            raise RoutesError(f"captured has shape {tuple(captured.shape)}: expected [{rows}]")

    def first_fault(self, ids: Tensor, captured: Tensor | None) -> tuple[int, str] | None:
        """First row of ids [tokens, layers, topk] that cannot be a router's choice, and why; None if all can."""
        used = ids[:, list(self.sparse_layers)]  # [tokens, sparse layers, topk]
        strange = used < 0
        if self.experts <= torch.iinfo(used.dtype).max:  # else PyTorch would wrap the number, and find it in every row
            strange |= used >= self.experts
        for shift in range(1, self.topk // 2 + 1):  # every pair of a row meets at one of these shifts
            strange |= used == used.roll(shift, -1)
        if captured is not None:
            strange &= captured[:, None, None]
        if not strange.any():
            return None
        row, layer, _ = (int(i) for i in strange.nonzero()[0])
        chosen = used[row, layer].tolist()
        where = f"in layer {self.sparse_layers[layer]} its experts are {chosen}"
        if min(chosen) < 0 or max(chosen) >= self.experts:
            dtype = route_dtype(self.experts)
            why = f"the model has {self.experts}: routes of another model, or ids cut by a narrow type (not {dtype})"
        elif not any(chosen):
            why = "the rollout's MoE kernel captured none: change the rollout engine's moe backend"
        else:
            why = (
                "one of them twice: the capture is stale, so check the rollout engine's cache and KV connector settings"
            )
        return row, f"{where}; {why}"


def pack_routes(
    routes: Seq[Tensor | None], captured: Seq[Tensor | None], lengths: Seq[int]
) -> tuple[Tensor, Tensor | None]:
    """Routes of a micro batch, one row a token.

    Rows that nothing reads (padding, and a sample's last token if the rollout stopped there) get the experts 0, 1, …:
    distinct, because the dispatcher counts tokens x topk.

    Args:
        routes: per segment [rows, layers, topk], rows <= its length; None for padding.
        captured: per segment bool [rows], or None where every row is there.
        lengths: tokens of each segment, padding included.

    Returns:
        ids, in the samples' own type, [sum(lengths), layers, topk], and captured, bool [sum(lengths)], or None if no
        sample has gaps: where it is False, the router chooses for itself.
    """
    given = [r for r in routes if r is not None]
    dtype = torch.int16 if any(r.dtype == torch.int16 for r in given) else torch.uint8
    layers, topk = given[0].shape[1:]
    filler = torch.arange(topk, dtype=dtype).expand(max(lengths), layers, topk)
    pieces: list[Tensor] = []
    for route, length in zip(routes, lengths, strict=True):
        rows = 0 if route is None else len(route)
        if route is not None:
            pieces.append(route.to(dtype))
        if rows < length:
            pieces.append(filler[: length - rows])
    ids = torch.cat(pieces)
    if all(there is None for there in captured):
        return ids, None
    mask = torch.ones(len(ids), dtype=torch.bool)
    start = 0
    for there, length in zip(captured, lengths, strict=True):
        if there is not None:
            mask[start : start + len(there)] = there
        start += length
    return ids, None if mask.all() else mask
