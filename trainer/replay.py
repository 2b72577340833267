"""Rollout Routing Replay (R3): the experts that a rollout used, checked, and packed with the tokens they belong to.

Routes stay compact (one or two bytes an id) from the rollout to the layer that widens them, and travel inside their
micro batch: there is no state outside it that a second micro batch, a recomputation, a forward-only pass or an
exception could leave behind.

Faults this module refuses, seen in public projects: missing or short routes (vllm#28284, miles#407), all-zero rows of
a backend that never captured (vllm#54730, vllm-ascend#16314), ids wrapped by a narrow type (verl#7880).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

CAPTURE_SETTING = "generator.inference_engine.enable_return_routed_experts"


class RoutesError(ValueError):
    """A rollout's routes cannot be replayed; the message names the sample and the setting at fault."""


def route_dtype(num_experts: int) -> torch.dtype:
    """Smallest integer type that holds every expert id: uint8 up to 256 experts, int16 above."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def check_routes(
    routes: Tensor | None, captured: Tensor | None, tokens: int, sparse_layers: Seq[int], shape: tuple[int, int, int]
) -> None:
    """Raise `RoutesError` at the first fault of one sample's routes.

    Args:
        routes: uint8 or int16 [rows, layers, topk], rows == tokens, or tokens - 1 (the last token was never an input).
        captured: bool [rows], False where the rollout has no route for the token; None means all are there.
        tokens: length of the sample, prompt and response.
        sparse_layers: absolute layers that route; the rows of other layers are not read.
        shape: (layers, topk, experts) of the model.
    """
    layers, topk, experts = shape
    if routes is None:
        raise RoutesError(
            f"no routes: R3 replays the rollout's experts, so set {CAPTURE_SETTING}=true (or beam.r3=false)"
        )
    if routes.dtype not in (torch.uint8, torch.int16):
        raise RoutesError(f"routes are {routes.dtype}: expected {route_dtype(experts)} for {experts} experts")
    if routes.dim() != 3 or tuple(routes.shape[1:]) != (layers, topk):
        raise RoutesError(f"routes have shape {tuple(routes.shape)}: expected [{tokens}, {layers}, {topk}]")
    rows = len(routes)
    if rows not in (tokens - 1, tokens):
        raise RoutesError(
            f"{rows} rows of routes for {tokens} tokens: expected {tokens - 1} (one an input token) or {tokens};"
            " a prefix-cache hit or an external KV cache drops rows, so check the rollout engine's cache settings"
        )
    used = routes[:, list(sparse_layers)]  # [rows, sparse layers, topk]
    if captured is not None:
        if captured.shape != (rows,):
            raise RoutesError(f"captured has shape {tuple(captured.shape)}: expected [{rows}]")
        used = used[captured.bool()]
    if used.numel() == 0:
        return
    low, high = int(used.min()), int(used.max())
    if low < 0 or high >= experts:
        raise RoutesError(
            f"expert ids from {low} to {high}, but the model has {experts} experts: routes of another model, or ids cut"
            f" by a narrow type ({route_dtype(experts)} is the right one)"
        )
    if topk == 1:
        return
    ordered = used.sort(-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1)  # [rows, sparse layers]
    if repeated.any():
        row, layer = (int(i) for i in repeated.nonzero()[0])
        experts_of_row = used[row, layer].tolist()
        never = not bool(used.any())
        cause = (
            "the rollout's MoE kernel never captured them: change its moe backend" if never else "the capture is stale"
        )
        raise RoutesError(
            f"token {row} of layer {sparse_layers[layer]} has experts {experts_of_row}, one of them twice: {cause}"
        )


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
    ids = torch.arange(topk, dtype=dtype).expand(sum(lengths), layers, topk).contiguous()
    mask = torch.ones(len(ids), dtype=torch.bool)
    start = 0
    for route, there, length in zip(routes, captured, lengths, strict=True):
        if route is not None:
            ids[start : start + len(route)] = route
        if there is not None:
            mask[start : start + len(there)] = there
        start += length
    return ids, None if mask.all() else mask
