"""avg@k of any environment's grades."""

import asyncio
from typing import Any

import pytest

from beam_rl import recipe
from beam_rl.evaluation import evaluate
from beam_rl.problems import load_problems


class Answers:
    """A generator whose responses have these rewards, and these metrics of the environment."""

    def __init__(self, rewards: list[float], metrics: list[dict[str, Any]] | None) -> None:
        self.output = {"rewards": rewards, "env_metrics": metrics, "stop_reasons": ["stop"] * len(rewards)}

    async def generate(self, inputs: Any, **_: Any) -> Any:
        assert len(inputs["prompts"]) == len(self.output["rewards"])
        return self.output


@pytest.mark.parametrize("has_metrics", [True, False])
def test_an_environment_without_an_accuracy_is_graded_by_its_rewards(
    has_metrics: bool, content: dict[str, Any], write: Any
) -> None:
    """A wrong answer's reward of -1 is no success, though it is true as a number."""
    from transformers import AutoTokenizer

    loaded = recipe.load(write(content))
    tokenizer = AutoTokenizer.from_pretrained(loaded.model_path)
    problems = load_problems(loaded.data.val_data, "data.val_data", tokenizer, loaded, False, print)
    rewards = [1.0, -1.0, 0.0, 1.0] * (len(problems) // 2)
    answers: Any = Answers(rewards, [{"turns": 1}] * len(rewards) if has_metrics else None)
    record = asyncio.run(evaluate(loaded, problems, answers, 0))
    assert (record["avg8"], record["samples"], record["no_answer_share"]) == (0.5, 2, 0.0)
