"""The gap monitor."""

import math

import numpy as np
import pytest

from beam_rl import gap
from beam_rl.gap import Gap, GapMonitor
from beam_rl.settings import GapSettings


def test_the_gap_is_over_unmasked_tokens_alone() -> None:
    trainer = np.array([[-1.0, -2.0, -9.0]], dtype=np.float32)
    rollout = np.array([[-1.5, -2.0, 0.0]], dtype=np.float32)
    measured = gap.measure(trainer, rollout, np.array([[1.0, 1.0, 0.0]]))
    assert measured == Gap(mean=0.25, p99=pytest.approx(0.495), max=0.5, tokens=2)


def test_a_batch_without_tokens_has_no_gap() -> None:
    zeros = np.zeros((2, 3))
    assert gap.measure(zeros, zeros, zeros).tokens == 0


def test_a_diverged_policy_is_an_error_not_a_small_gap() -> None:
    with pytest.raises(ValueError, match="not finite"):
        gap.measure(np.array([np.nan]), np.array([0.0]), np.array([1.0]))


def test_nonfinite_rollout_logprobs_leave_loss_and_denominator() -> None:
    """Including SkyRL's stand-in for them: a log-prob of -9999 would swamp every mean."""
    logprobs = [[-1.0, math.nan, -9999.0], [math.inf, -math.inf, -0.5]]
    masks = [[1, 1, 1], [1, 0, 1]]
    assert gap.drop_nonfinite(logprobs, masks) == 3  # one of the four was masked before
    assert masks == [[1, 0, 0], [0, 0, 1]]
    assert logprobs == [[-1.0, 0.0, 0.0], [0.0, 0.0, -0.5]]


def test_only_steps_in_a_row_over_budget_count() -> None:
    monitor = GapMonitor(GapSettings(patience=2, action="stop"), 0.01)
    over, under = Gap(0.02, 0, 0, 1), Gap(0.005, 0, 0, 1)
    assert monitor.update(over) is None
    assert monitor.update(under) is None
    assert monitor.update(over) is None
    assert not monitor.stop
    message = monitor.update(over)
    assert message is not None
    assert "2 steps in a row" in message
    assert monitor.stop


def test_warn_never_stops() -> None:
    monitor = GapMonitor(GapSettings(patience=1, action="warn"), 0.01)
    assert monitor.update(Gap(1.0, 1.0, 1.0, 1)) is not None
    assert not monitor.stop


def test_the_budget_itself_is_within_budget() -> None:
    monitor = GapMonitor(GapSettings(patience=1), 0.01)
    assert monitor.update(Gap(0.01, 0, 0, 1)) is None


def test_a_gap_of_other_weights_ends_the_run_whatever_the_action() -> None:
    """Seen with a transport that transferred nothing: 9.8 nats in every step, and a run that only warned."""
    with pytest.raises(RuntimeError, match="do not run on the same weights"):
        GapMonitor(GapSettings(action="warn"), 0.01).update(Gap(9.8, 15.0, 21.6, 4000))
