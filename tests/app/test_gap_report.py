"""The gap's statistics, and what is said of where it comes from."""

import numpy as np
import pytest

from beam_rl import gap_report
from beam_rl.gap_report import Row


def test_statistics_agree_with_their_definitions() -> None:
    rng = np.random.default_rng(0)
    rollout = -rng.exponential(size=1000).astype(np.float32)
    trainer = rollout + rng.normal(scale=0.01, size=1000).astype(np.float32)
    row = gap_report.row("bf16", False, trainer, rollout, routes_differ=0.25, budget=0.01)
    size = np.abs(trainer.astype(np.float64) - rollout)
    ratio = np.exp(trainer.astype(np.float64) - rollout)
    assert row.mean == pytest.approx(size.mean())
    assert (row.p50, row.p99, row.max) == (np.quantile(size, 0.5), np.quantile(size, 0.99), size.max())
    assert row.kl == pytest.approx((ratio - 1 - np.log(ratio)).mean())
    assert row.kl > 0
    assert (row.tokens, row.routes_differ) == (1000, 0.25)


def test_replayed_routes_do_not_differ() -> None:
    assert gap_report.row("bf16", True, np.zeros(3), np.zeros(3), routes_differ=0.25, budget=0.01).routes_differ == 0


def test_routes_are_compared_as_sets_in_sparse_layers_only() -> None:
    theirs = np.array([[[0, 0], [1, 2]], [[0, 0], [3, 1]]], dtype=np.uint8)  # [tokens, layers, topk]
    ours = np.array([[[-1, -1], [2, 1]], [[-1, -1], [3, 2]]], dtype=np.int16)
    assert gap_report.differing(ours, theirs, [1]).tolist() == [[False], [True]]


def test_the_first_layer_that_parts_is_named() -> None:
    theirs = np.ones((4, 3, 8), dtype=np.float32)
    ours = theirs * np.array([1, 1, 1.001, 1.1], dtype=np.float32)[:, None, None]
    layers, first = gap_report.parting(ours, theirs, 0.01)
    assert first == 3
    assert layers[2] == pytest.approx(0.001, rel=1e-3)
    assert gap_report.parting(theirs, theirs, 0.01)[1] is None


def test_the_widest_tokens_say_whether_their_routes_flipped() -> None:
    tokens = [np.array([5, 6, 7, 8])]  # two of the prompt, two of the response
    flips = [np.array([[False], [True], [False]])]
    found = gap_report.widest([np.array([-1.0, -2.0])], [np.array([-1.5, -2.1])], flips, tokens, count=1)
    assert found == [
        {
            "sample": 0,
            "position": 2,
            "token": 7,
            "trainer": -1.0,
            "rollout": -1.5,
            "difference": 0.5,
            "layers_rerouted": 1,
            "layers_rerouted_before": 0,
        }
    ]


def test_a_row_says_what_it_is_in_json() -> None:
    row = Row("lora", True, 0.1, 0.1, 0.2, 0.3, 0.0, 0.0, 0.01, 9)
    assert gap_report.as_json([row], ["note"], {})["rows"][0]["precision"] == "lora"
