"""The gap between trainer and rollout: |log p_trainer - log p_rollout| of every response token, against a budget.

Both sides score the same tokens with what should be the same weights, so the gap measures kernels, rounding and
routing alone. Its mean is what an off-policy correction would have to repair; a mean over budget is a fault to find.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_rl.settings import GapSettings

CLAMPED_LOGPROB = -9999.0
"""What SkyRL's server writes for a missing or non-finite log-prob (`generate_wire.CLAMPED_LOGPROB`)."""
APART = 1.0
"""Mean gap that neither rounding nor routing makes: the two sides then have different weights, or sample otherwise."""


@dataclass(frozen=True)
class Gap:
    """The gap of one step, in nats a token."""

    mean: float
    p99: float
    max: float
    tokens: int
    """Response tokens compared."""


def measure(trainer: NDArray[Any], rollout: NDArray[Any], mask: NDArray[Any]) -> Gap:
    """The gap over the positions where `mask` > 0; all three have one shape. Zeros where there is no such position.

    Raises ValueError when the trainer's log-probs are not finite: its weights are broken, nothing can be compared.
    """
    chosen = mask > 0
    ours, theirs = trainer[chosen], rollout[chosen]
    if not np.isfinite(ours).all():
        raise ValueError(
            f"{np.count_nonzero(~np.isfinite(ours))} of {ours.size} trainer log-probs are not finite: "
            "the policy's weights have diverged. Lower trainer.policy.optimizer_config.lr."
        )
    if ours.size == 0:
        return Gap(0.0, 0.0, 0.0, 0)
    difference = np.abs(ours.astype(np.float64) - theirs)
    p99 = float(np.quantile(difference, 0.99))
    return Gap(float(difference.mean()), p99, float(difference.max()), int(difference.size))


def drop_nonfinite(logprobs: Sequence[list[float]], loss_masks: Sequence[list[int]]) -> int:
    """Take tokens without a usable rollout log-prob out of the loss and of its denominator, in place.

    Their mask becomes 0 and their log-prob 0.0, so that no NaN survives a multiplication. Returns how many.
    """
    dropped = 0
    for values, mask in zip(logprobs, loss_masks, strict=True):
        array = np.asarray(values, dtype=np.float64)
        for position in np.flatnonzero(~np.isfinite(array) | (array <= CLAMPED_LOGPROB)):
            dropped += int(mask[position] > 0)
            values[position] = 0.0
            mask[position] = 0
    return dropped


class GapMonitor:
    """Compares every step's mean gap with the budget and says when enough steps in a row were over it."""

    def __init__(self, settings: GapSettings, budget: float) -> None:
        self.settings = settings
        self.budget = budget
        self.over = 0
        """Steps in a row over the budget, up to now."""

    def update(self, gap: Gap) -> str | None:
        """Take one step's gap; returns what to tell the user, once for each full `patience`, else None.

        Raises RuntimeError when trainer and rollout cannot compute the same distribution, whatever the `action`.
        """
        if gap.mean > max(APART, self.budget):
            raise RuntimeError(
                f"the mean gap is {gap.mean:.2f} nats over {gap.tokens:,} tokens, the largest {gap.max:.2f}: trainer "
                "and rollout do not run on the same weights, or sample otherwise than the trainer counts, and nothing "
                "can be learned. Look for the weight transfer in the run folder's logs/workers.log."
            )
        self.over = self.over + 1 if gap.mean > self.budget else 0
        if self.over == 0 or self.over % self.settings.patience:
            return None
        return (
            f"the mean gap was over its budget of {self.budget:g} for {self.over} steps in a row "
            f"(now {gap.mean:.4f} mean, {gap.max:.3f} max)"
        )

    @property
    def stop(self) -> bool:
        """Whether the run should end now."""
        return self.settings.action == "stop" and self.over >= self.settings.patience

    def measures_without_r3(self, step: int) -> bool:
        """Whether this step also measures the gap with the trainer's own routes."""
        every = self.settings.without_r3_interval
        return every > 0 and (step == 1 or step % every == 0)
