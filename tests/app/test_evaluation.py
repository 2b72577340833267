"""avg@k of any environment's grades."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import skyrl_gym

from beam_rl import environment, recipe
from beam_rl.evals import sources
from beam_rl.evals.results import Sample
from beam_rl.evals.summary import summarize
from beam_rl.evals.task import grade_response
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
    assert record["maj8"] is None


def test_training_and_the_command_give_the_same_responses_the_same_numbers(
    content: dict[str, Any], write: Any, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    environment.register()
    labels = ["7", r"336^\circ", r"\frac{1}{2}"]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"problem": f"q{n}", "answer": text}) + "\n" for n, text in enumerate(labels)))
    content["data"]["val_data"] = [str(pairs)]
    content["trainer"]["max_prompt_length"] = 128
    loaded = recipe.load(write(content))
    tokenizer = AutoTokenizer.from_pretrained(loaded.model_path)
    problems = load_problems(loaded.data.val_data, "data.val_data", tokenizer, loaded, False, print)
    responses = [
        [(r"\boxed{007}", "stop"), (r"\boxed{8}", "stop")],
        [(r"\boxed{336}", "length"), ("so far", "length")],
        [(r"\boxed{0.5}", "stop"), ("nothing", "stop")],
    ]
    flat = [one for row in responses for one in row]
    metrics = []
    for index, (text, _) in enumerate(flat):
        env = skyrl_gym.make("beam_math", env_config={}, extras=problems.rows[index // 2])
        env.step(text)
        metrics.append(env.get_metrics())
    answers: Any = Answers([1.0] * 6, metrics)
    answers.output |= {
        "stop_reasons": [stop for _, stop in flat],
        "response_ids": [[1] * len(text) for text, _ in flat],
    }
    record = asyncio.run(evaluate(loaded, problems, answers, 0))

    task = sources.load(str(pairs))
    samples = []
    for problem, row in zip(task.problems, responses, strict=True):
        for number, (text, stop) in enumerate(row):
            verdict, answer = grade_response(problem, text, stop == "length")
            samples.append(
                Sample(
                    problem=problem.id, sample=number, verdict=verdict, answer=answer, tokens=len(text),
                    finish_reason=stop,
                )
            )  # fmt: skip
    summary = summarize(task, samples, 2, 1.0)
    assert (summary.avg, summary.pass_k, summary.maj_k) == (0.5, 1.0, pytest.approx(2.5 / 3))
    assert (record["avg8"], record["se"], record["pass8"], record["maj8"]) == (
        *(summary.avg, summary.se, summary.pass_k, summary.maj_k),
    )
    assert (record["truncated_share"], record["no_answer_share"]) == (1 / 3, 1 / 6)
    assert record["response_length_mean"] == summary.tokens_mean
    assert problems.rows[0]["prompt"] == [{"role": "user", "content": task.message(task.problems[0])}]
