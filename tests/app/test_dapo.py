"""DAPO's rules: faults that other projects met with length penalties and dynamic sampling."""

import itertools
import random

import pytest

from beam_rl.dapo import DynamicSampling, informative, overlong_penalty, short_split
from beam_rl.settings import OverlongSettings

LIMIT = 24
SETTINGS = OverlongSettings(buffer=8, factor=1.0)


def test_longer_is_never_better() -> None:
    """SkyRL's example gives 0 to an overlong answer and -1 to a wrong one: rambling beats being wrong."""
    for task_reward in (1.0, 0.0, -1.0):
        rewards = [task_reward + overlong_penalty(length, LIMIT, SETTINGS) for length in range(LIMIT + 1)]
        assert all(later <= earlier for earlier, later in itertools.pairwise(rewards))


def test_the_penalty_is_the_published_one() -> None:
    assert overlong_penalty(16, LIMIT, SETTINGS) == 0.0
    assert overlong_penalty(20, LIMIT, SETTINGS) == pytest.approx(-0.5)
    assert overlong_penalty(24, LIMIT, SETTINGS) == pytest.approx(-1.0)
    assert overlong_penalty(24, LIMIT, OverlongSettings(buffer=8, factor=0.5)) == pytest.approx(-0.5)
    assert overlong_penalty(24, LIMIT, None) == 0.0


def test_float_noise_is_no_learning_signal() -> None:
    """The standard deviation of equal rewards can be positive in floating point (NeMo-RL#4158)."""
    noisy = [0.1 + 0.2, 0.3, 0.3]
    assert len(set(noisy)) > 1
    assert not informative(noisy, 1e-6)
    assert informative([0.0, 1.0, 0.0], 1e-6)


def collect(sampling: DynamicSampling, batches: list[tuple[int, int]]) -> list[str] | None:
    """Feed (informative, silent) counts; returns the chosen groups of the last decision."""
    names = (f"group{index}" for index in itertools.count())
    for signal, silent in batches:
        selection = sampling.add(list(itertools.islice(names, signal)), list(itertools.islice(names, silent)))
        if selection is not None:
            return selection.groups
    return None


@pytest.mark.parametrize("mode", ["pad", "train_short", "skip"])
def test_no_informative_group_at_all_is_no_crash(mode: str) -> None:
    """SkyRL's filter fails on an empty concatenation, and raises when the limit is reached."""
    sampling = DynamicSampling(wanted=8, updates=2, max_batches=3, on_exhausted=mode)  # type: ignore[arg-type]
    assert sampling.add([], [str(i) for i in range(8)]) is None
    assert sampling.add([], [str(i) for i in range(8, 16)]) is None
    selection = sampling.add([], [str(i) for i in range(16, 24)])
    assert selection is not None
    assert selection.updates == 0
    assert len(selection.groups) == 8
    assert "0 of 8" in (selection.note or "")


def test_a_full_batch_has_exactly_the_wanted_groups_in_order() -> None:
    sampling = DynamicSampling(wanted=4, updates=2, max_batches=9, on_exhausted="pad")
    assert collect(sampling, [(3, 1), (3, 1)]) == ["group0", "group1", "group2", "group4"]


def test_padding_takes_silent_groups_only_for_what_is_missing() -> None:
    sampling = DynamicSampling(wanted=4, updates=2, max_batches=1, on_exhausted="pad")
    assert collect(sampling, [(3, 2)]) == ["group0", "group1", "group2", "group3"]


@pytest.mark.parametrize("ranks_stride", [1, 2, 4])
@pytest.mark.parametrize("mode", ["pad", "train_short", "skip"])
def test_every_batch_divides_by_mini_batches_and_ranks(mode: str, ranks_stride: int) -> None:
    """A filtered batch that does not divide hangs the collectives (verl#5228)."""
    random.seed(0)
    for _ in range(300):
        updates = random.choice([1, 2, 4])
        sampling = DynamicSampling(
            wanted=updates * 4,
            updates=updates,
            max_batches=random.randint(1, 3),
            on_exhausted=mode,
            stride=ranks_stride,
        )  # type: ignore[arg-type]
        selection = None
        counter = itertools.count()
        while selection is None:
            size = sampling.next_size()
            assert size % ranks_stride == 0
            assert 0 < size <= 3 * sampling.wanted + ranks_stride
            signal = random.randint(0, size // 2)
            names = [str(next(counter)) for _ in range(size)]
            selection = sampling.add(names[:signal], names[signal:])
        assert len(set(selection.groups)) == len(selection.groups) > 0
        if selection.updates:
            assert len(selection.groups) % (selection.updates * ranks_stride) == 0


def test_a_short_split_uses_as_many_mini_batches_as_it_can() -> None:
    assert short_split(groups=7, updates=2, stride=1) == (2, 3)
    assert short_split(groups=1, updates=2, stride=1) == (1, 1)
    assert short_split(groups=3, updates=2, stride=2) == (1, 2)
    assert short_split(groups=1, updates=2, stride=2) == (0, 0)


def test_a_refill_asks_for_what_is_missing_not_for_a_whole_batch() -> None:
    sampling = DynamicSampling(wanted=32, updates=2, max_batches=9, on_exhausted="pad")
    assert sampling.next_size() == 32
    sampling.add([str(i) for i in range(24)], [f"silent{i}" for i in range(8)])
    assert sampling.next_size() == 12  # 8 missing, three quarters are informative, a tenth more


def test_a_step_generates_more_when_few_groups_were_informative_but_never_without_bound() -> None:
    """One large batch costs less than a small one and two refills; DAPO generates 1,536 prompts for 512."""
    sizes = {
        share: DynamicSampling(wanted=32, updates=2, max_batches=9, on_exhausted="pad", expected=share).next_size()
        for share in (1.0, 0.5, 0.0)
    }
    assert sizes == {1.0: 32, 0.5: 71, 0.0: 96}
