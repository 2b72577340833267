"""What the log-probs of the two sides tell: the gap's statistics, and where it comes from. Pure functions."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Row:
    """One line of the table: a precision, with or without R3. Gaps in nats a response token."""

    precision: str
    r3: bool
    mean: float
    p50: float
    p99: float
    max: float
    kl: float
    """k3 estimate of KL(rollout || trainer), nats a token: mean of r - 1 - log r with r = p_trainer / p_rollout."""
    routes_differ: float
    """Share of token-layers whose set of experts is not the rollout's: 0 where it is replayed."""
    budget: float
    tokens: int
    """Response tokens compared."""


def row(precision: str, r3: bool, trainer: Array, rollout: Array, routes_differ: float, budget: float) -> Row:
    """The statistics of log-probs [tokens] of both sides."""
    difference = trainer.astype(np.float64) - rollout.astype(np.float64)
    size = np.abs(difference)
    return Row(
        precision=precision,
        r3=r3,
        mean=float(size.mean()),
        p50=float(np.quantile(size, 0.5)),
        p99=float(np.quantile(size, 0.99)),
        max=float(size.max()),
        kl=float((np.expm1(difference) - difference).mean()),
        routes_differ=0.0 if r3 else routes_differ,
        budget=budget,
        tokens=len(size),
    )


def differing(ours: Array, theirs: Array, sparse: Sequence[int]) -> Array:
    """Where the sets of experts differ: bool [tokens, sparse layers] of routes [tokens, layers, topk] by layer."""
    chosen = [np.sort(routes[:, list(sparse)].astype(np.int64), axis=-1) for routes in (ours, theirs)]
    return (chosen[0] != chosen[1]).any(-1)


def parting(ours: Array, theirs: Array, threshold: float) -> tuple[list[float], int | None]:
    """How far the hidden states [layers, tokens, hidden] are apart, layer by layer.

    Returns:
        relative difference (norm of the difference by norm of the rollout's) of every layer, meant over tokens, and
        the first layer in which it exceeds `threshold`, if any does.
    """
    distance = np.linalg.norm(ours - theirs, axis=-1) / np.maximum(np.linalg.norm(theirs, axis=-1), 1e-30)
    layers = distance.mean(-1).tolist()
    return layers, next((layer for layer, value in enumerate(layers) if value > threshold), None)


def widest(
    trainer: Sequence[Array],
    rollout: Sequence[Array],
    flips: Sequence[Array | None],
    tokens: Sequence[Array],
    count: int,
) -> list[dict[str, Any]]:
    """The response tokens with the largest differences, the largest first.

    Args:
        trainer, rollout: log-probs [response] a sample.
        flips: bool [n - 1, sparse layers] a sample: token-layers whose own routes differ from the rollout's.
        tokens: ids [n] a sample.
    """
    found = []
    for sample, (ours, theirs, flip, ids) in enumerate(zip(trainer, rollout, flips, tokens, strict=True)):
        prompt = len(ids) - len(ours)
        for place in range(len(ours)):
            predicting = prompt + place - 1  # the token whose output makes the prediction
            found.append(
                {
                    "sample": sample,
                    "position": prompt + place,
                    "token": int(ids[prompt + place]),
                    "trainer": float(ours[place]),
                    "rollout": float(theirs[place]),
                    "difference": abs(float(ours[place]) - float(theirs[place])),
                    "layers_rerouted": 0 if flip is None else int(flip[predicting].sum()),
                    "layers_rerouted_before": 0 if flip is None else int(flip[:predicting].sum()),
                }
            )
    return sorted(found, key=lambda item: -item["difference"])[:count]


def as_json(rows: Sequence[Row], notes: Sequence[str], explained: dict[str, Any]) -> dict[str, Any]:
    """The table as plain values."""
    return {"rows": [asdict(each) for each in rows], "notes": list(notes), "explained": explained}
