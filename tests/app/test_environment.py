"""The math environment, made as SkyRL's generator makes it."""

import pytest
import skyrl_gym
from skyrl_gym.metrics import aggregate_for_environment

from beam_rl.environment import register
from beam_rl.evals.arithmetic import generate, row, solution


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()
    register()  # a second registration changes nothing


def _step(response: str, label: object = "14", **spec: str) -> tuple[dict, dict]:
    env = skyrl_gym.make("beam_math", env_config={}, extras={"reward_spec": {"ground_truth": label, **spec}})
    env.init([{"role": "user", "content": "12+7-5=?"}])
    output = env.step(response)
    metrics = env.get_metrics()
    env.close()
    return dict(output), metrics


@pytest.mark.parametrize(
    ("response", "reward", "verdict"),
    [
        (r"19-5=\boxed{14}", 1.0, "correct"),
        (r"19-5=\boxed{15}", -1.0, "wrong"),
        (r"\boxed{12+7-5}", -1.0, "wrong"),
        (r"19-5=14", -1.0, "no_answer"),
    ],
)
def test_reward_follows_the_verdict(response: str, reward: float, verdict: str) -> None:
    output, metrics = _step(response, method="integer")
    assert output["reward"] == reward
    assert output["done"] is True
    assert output["observations"] == []
    assert output["metadata"] == {"verdict": verdict, "accuracy": float(verdict == "correct")}
    assert metrics["verdict"] == verdict
    assert metrics["no_answer"] == float(verdict == "no_answer")


def test_expression_counts_where_the_row_does_not_ask_for_an_integer() -> None:
    assert _step(r"\boxed{\frac{28}{2}}", 14)[0]["reward"] == 1.0


def test_shares_are_averages_over_episodes() -> None:
    episodes = [_step(response, method="integer")[1] for response in (r"\boxed{14}", r"\boxed{1}", "x", r"\boxed{014}")]
    shares = aggregate_for_environment("beam_math", episodes)
    assert shares == {"accuracy": 0.5, "no_answer": 0.25, "grader_timeout": 0.0}


def test_row_without_a_label_is_refused() -> None:
    with pytest.raises(ValueError, match="ground_truth"):
        skyrl_gym.make("beam_math", env_config={}, extras={"reward_model": {"ground_truth": "1"}})


def test_every_worked_solution_is_rewarded() -> None:
    """A task whose own solutions the environment marks wrong would teach the opposite."""
    problems = generate(seed=1, train=512, held_out=64).train
    environments = [skyrl_gym.make("beam_math", env_config={}, extras=row(problem)) for problem in problems]
    rewards = [env.step(solution(problem))["reward"] for env, problem in zip(environments, problems, strict=True)]
    assert rewards == [1.0] * 512
