"""Dynamic sampling inside SkyRL's trainer: its batches, mini-batches and observers, without processes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from beam_rl import recipe
from beam_rl.rollouts import RolloutStats, split_groups
from beam_rl.training import BeamTrainer

SAMPLES = 4


class Notes:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def trainer(content: dict[str, Any], write: Any) -> BeamTrainer:
    """A trainer with what its sampling touches, batches of 8 groups in 2 mini-batches."""
    loaded = recipe.load(write(content), ["trainer.algorithm.dynamic_sampling.max_sample_batches=2"])
    bare = BeamTrainer.__new__(BeamTrainer)
    bare.recipe = loaded
    bare.cfg = SimpleNamespace(trainer=loaded.trainer, generator=loaded.generator)
    bare.observer = Notes()  # type: ignore[assignment]
    bare.stats = RolloutStats()
    bare.selection = bare.sampling = None
    bare.collected = []
    bare.informative_share = 1.0
    bare.stream = SimpleNamespace(wanted=8)
    bare.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 1)
    bare.tokenizer = SimpleNamespace(pad_token_id=0)
    bare.all_metrics = {}
    bare.global_step = 1
    return bare


def generated(trainer: BeamTrainer, first: int, signal: int, silent: int) -> tuple[Any, list[str]]:
    """A generated batch whose group ids count from `first`; informative groups have one right answer of four."""
    uids = [str(first + index // SAMPLES) for index in range((signal + silent) * SAMPLES)]
    right = [i // SAMPLES < signal and i % SAMPLES == 0 for i in range(len(uids))]
    output = {
        "prompt_token_ids": [[1, int(uid)] for uid in uids],
        "response_ids": [[2, 3 + index % SAMPLES] for index in range(len(uids))],
        "rewards": [1.0 if good else -1.0 for good in right],
        "loss_masks": [[1, 1] for _ in uids],
        "stop_reasons": ["stop"] * len(uids),
        "rollout_metrics": None,
        "rollout_logprobs": [[-0.1, -0.2] for _ in uids],
        "rollout_expert_indices": [np.zeros((3, 2, 1), dtype=np.uint8) for _ in uids],
        "env_metrics": [{"accuracy": float(good)} for good in right],
    }
    trainer.signal, trainer.silent = split_groups(uids, [float(good) for good in right], 1e-6)
    return output, uids


def test_groups_of_several_batches_train_together(trainer: BeamTrainer) -> None:
    output, uids, more = trainer.handle_dynamic_sampling(*generated(trainer, 0, signal=5, silent=3))
    assert more
    assert 3 <= trainer.stream.wanted <= 8  # refills ask for what is missing
    output, uids, more = trainer.handle_dynamic_sampling(*generated(trainer, 100, signal=4, silent=1))
    assert not more
    assert list(dict.fromkeys(uids)) == ["0", "1", "2", "3", "4", "100", "101", "102"]
    assert [prompt[1] for prompt in output["prompt_token_ids"]] == [int(uid) for uid in uids]
    assert len(output["rewards"]) == 8 * SAMPLES
    assert trainer.stream.wanted == 13  # 9 of 13 groups were informative: as many again, and a tenth, for 8
    assert trainer.observer.texts == []  # type: ignore[attr-defined]


def test_a_short_batch_divides_into_mini_batches_that_skyrl_accepts(trainer: BeamTrainer) -> None:
    trainer.recipe.beam.sampling.on_exhausted = "train_short"
    trainer.handle_dynamic_sampling(*generated(trainer, 0, signal=3, silent=5))
    output, uids, more = trainer.handle_dynamic_sampling(*generated(trainer, 100, signal=2, silent=6))
    assert not more
    assert len(output["response_ids"]) == 4 * SAMPLES  # the fifth would leave two mini-batches unequal
    output["rewards"] = [[0.0, reward] for reward in output["rewards"]]
    data = trainer.convert_to_training_input(output, uids)
    assert data.metadata["policy_mini_batch_boundaries"] == [(0, 8), (8, 16)]
    assert trainer.cfg.trainer.train_batch_size == 8  # the next step wants a full batch again
    assert "found 5 of 8" in trainer.observer.texts[0]  # type: ignore[attr-defined]


def test_a_step_without_signal_updates_nothing(trainer: BeamTrainer) -> None:
    trainer.handle_dynamic_sampling(*generated(trainer, 0, signal=0, silent=8))
    output, _, more = trainer.handle_dynamic_sampling(*generated(trainer, 100, signal=0, silent=8))
    assert not more
    assert len(output["response_ids"]) == 8 * SAMPLES
    assert trainer._execute_training_step("policy", SimpleNamespace(metadata={})) == {}  # type: ignore[arg-type]
    assert trainer.updates == 0
    assert "no update" in trainer.observer.texts[0]  # type: ignore[attr-defined]


def test_reported_shares_count_what_was_filtered_out() -> None:
    stats = RolloutStats()
    stats.add({
        "rewards": [1.0, -1.0, [0.0, -1.5], -1.0], "response_ids": [[1], [1, 2], [1, 2, 3], [1]],
        "stop_reasons": ["stop", "stop", "length", "stop"],
        "env_metrics": [{"accuracy": 1.0}, {"accuracy": 0.0}, {"accuracy": 0.0}, {"accuracy": 0.0, "no_answer": 1.0}],
    })  # type: ignore[typeddict-item]  # fmt: skip
    record = stats.record()
    assert record["reward_mean"] == pytest.approx(-0.625)
    assert (record["accuracy"], record["truncated_share"], record["no_answer_share"]) == (0.25, 0.25, 0.25)
    assert record["response_length_mean"] == 1.75
