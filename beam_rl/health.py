"""What a healthy run's metrics look like, and whether this one's do."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from beam_rl.charts import number, percent
from beam_rl.records import Record

State = Literal["healthy", "look", "red flag", "no data"]

WINDOW = 10
"""Steps over which the present is averaged, so that one noisy step raises no alarm."""


@dataclass(frozen=True)
class Check:
    """One metric of a run beside what to expect of it."""

    metric: str
    now: str
    healthy: str
    red_flag: str
    state: State


def check_run(steps: Sequence[Record]) -> list[Check]:
    """All checks, over the steps done so far."""
    return [
        _gap_mean(steps),
        _gap_max(steps),
        _trend(steps),
        _share(steps, "informative_share", "Informative groups", "20 % or more", "under 5 %", low=(0.20, 0.05)),
        _share(steps, "truncated_share", "Truncated responses", "under 5 %", "over 20 %", high=(0.05, 0.20)),
        _share(steps, "no_answer_share", "Responses without an answer", "under 5 %", "over 20 %", high=(0.05, 0.20)),
        _share(steps, "clip_share", "Clipped tokens", "under 5 %", "over 20 %", high=(0.05, 0.20)),
        _ratio(
            steps, "entropy", "Entropy", "falls slowly", "a tenth of its start, or three times", (0.3, 0.1), (1.5, 3)
        ),
        _ratio(
            steps, "response_length_mean", "Response length", "drifts", "a third or three times", (0.5, 1 / 3), (2, 3)
        ),
        _gradient(steps),
        _ratio(steps, "step_seconds", "Seconds a step", "steady", "twice its start", (0.0, 0.0), (1.5, 2)),
    ]


def _gap_mean(steps: Sequence[Record]) -> Check:
    metric, healthy, red_flag = "Gap, mean", "under the budget in every step", "over the budget, or not finite"
    gaps, budgets = _known(steps, "gap_mean"), _known(steps, "gap_budget")
    if not gaps:
        return _no_data(metric, healthy, red_flag)
    budget, worst = budgets[-1], max(gaps)
    # metrics.jsonl holds null for what is not finite, which is not within the budget
    over = sum(gap > budget for gap in gaps) + len(steps) - len(gaps)
    now = f"worst step {number(worst)}, budget {budget:g}"
    if over:
        return Check(metric, f"{now}; over in {over} of {len(steps)} steps", healthy, red_flag, "red flag")
    return Check(metric, now, healthy, red_flag, "look" if worst > 0.7 * budget else "healthy")


def _gap_max(steps: Sequence[Record]) -> Check:
    worst = max(_known(steps, "gap_max"), default=None)
    healthy, red_flag = "under 0.5", "over 2: some token's probability differs sevenfold"
    if worst is None:
        return _no_data("Gap, worst token", healthy, red_flag)
    return Check("Gap, worst token", number(worst), healthy, red_flag, _grade_high(worst, 0.5, 2.0))


def _trend(steps: Sequence[Record]) -> Check:
    rewards = _known(steps, "reward_mean")
    healthy, red_flag = "rises, then levels off", "falls by more than 0.1 from its best"
    if len(rewards) < 2:
        return _no_data("Reward", healthy, red_flag)
    window = min(WINDOW, max(1, len(rewards) // 3))
    smooth = [statistics.fmean(rewards[end - window : end]) for end in range(window, len(rewards) + 1)]
    lost = max(smooth) - smooth[-1]
    now = f"{number(smooth[0])} → {number(smooth[-1])}"
    rising = smooth[-1] > smooth[0]
    state: State = "red flag" if lost > 0.1 else "healthy" if rising else "look"
    return Check("Reward", now, healthy, red_flag, state)


def _gradient(steps: Sequence[Record]) -> Check:
    metric, healthy, red_flag = "Gradient norm", "within 3 times its median", "10 times its median, or not finite"
    norms = _known(steps, "grad_norm")
    if not norms:
        return _no_data(metric, healthy, red_flag)
    median, peak = statistics.median(norms), max(norms[-WINDOW:])
    now = f"recent peak {number(peak)}, median {number(median)}"
    if len(norms) < len(steps):  # metrics.jsonl holds null for what is not finite
        return Check(metric, f"{now}; not finite in {len(steps) - len(norms)} steps", healthy, red_flag, "red flag")
    return Check(metric, now, healthy, red_flag, _grade_high(peak, 3 * median, 10 * median))


def _share(
    steps: Sequence[Record],
    key: str,
    metric: str,
    healthy: str,
    red_flag: str,
    *,
    low: tuple[float, float] | None = None,
    high: tuple[float, float] | None = None,
) -> Check:
    known = _known(steps, key)
    if not known:
        return _no_data(metric, healthy, red_flag)
    now = statistics.fmean(known[-WINDOW:])
    state: State = "healthy"
    if high is not None:
        state = _grade_high(now, *high)
    if low is not None:
        state = _grade_high(-now, -low[0], -low[1])
    return Check(metric, percent(now), healthy, red_flag, state)


def _ratio(
    steps: Sequence[Record],
    key: str,
    metric: str,
    healthy: str,
    red_flag: str,
    low: tuple[float, float],
    high: tuple[float, float],
) -> Check:
    known = _known(steps, key)
    if len(known) < 2:
        return _no_data(metric, healthy, red_flag)
    window = min(WINDOW, len(known) // 2)
    start, now = statistics.median(known[:window]), statistics.median(known[-window:])
    ratio = now / start if start else 1.0
    order: list[State] = ["healthy", "look", "red flag"]
    state = max(_grade_high(ratio, *high), _grade_high(-ratio, -low[0], -low[1]), key=order.index)
    return Check(metric, f"{number(start)} → {number(now)}", healthy, red_flag, state)


def _grade_high(value: float, look: float, red_flag: float) -> State:
    return "red flag" if value > red_flag else "look" if value > look else "healthy"


def _known(steps: Sequence[Record], key: str) -> list[float]:
    return [float(step[key]) for step in steps if step.get(key) is not None]


def _no_data(metric: str, healthy: str, red_flag: str) -> Check:
    return Check(metric, "not recorded", healthy, red_flag, "no data")
