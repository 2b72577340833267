"""What the probe lets pass: rounding, which grows with the log-probs, and never another model's numbers."""

import pytest

from beam_rl.rollout import swap_probe


def found_and_fits(expected, found, dtype="bfloat16"):
    return swap_probe.compare(found, expected, swap_probe.tolerance(dtype, expected), "a test").fits


def test_rounding_on_a_prompt_that_the_model_finds_impossible_is_no_fault():
    """Most versions of a run were refused: 11 nats a token, apart by up to 0.28 in bfloat16."""
    expected = [-10.7] * 47
    assert found_and_fits(expected, [value + 0.28 for value in expected])
    assert not found_and_fits(expected, [value + 1.0 for value in expected])


def test_a_likely_prompt_has_the_plain_bound():
    expected = [-0.5] * 47
    assert found_and_fits(expected, [value + 0.04 for value in expected])
    assert not found_and_fits(expected, [value + 0.06 for value in expected])
    assert not found_and_fits(expected, [value + 0.04 for value in expected], "float32")


def test_an_expected_number_that_is_none_widens_nothing():
    expected = [-1.0] * 7 + [float("-inf")]
    assert swap_probe.tolerance("bfloat16", expected) == 0.05
    assert not found_and_fits(expected, [-1.0] * 8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_numbers_that_are_none_do_not_fit(dtype):
    assert not found_and_fits([-1.0] * 8, [float("nan")] * 8, dtype)
