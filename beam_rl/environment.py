"""The math environment: one question, one response, reward from the verdict on the boxed answer."""

from typing import Any

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.registration import registry

from beam_rl.evals.arithmetic import ENV_CLASS
from beam_rl.evals.grader import Verdict
from beam_rl.evals.task import Graded, Problem, grade_response, label

CORRECT_REWARD, WRONG_REWARD = 1.0, -1.0
"""As in DAPO (arXiv 2503.14476, eq. 7). Accuracy is reported beside the reward, never derived from its mean."""


class MathEnvironment(BaseTextEnv):
    """Single turn. The data row's `reward_spec` holds `ground_truth` and, optionally, `method`.

    `method: integer` asks for an integer literal: without it, a model could box the question itself (`12+7`) and have
    it evaluated. The environment does not see why generation stopped; `truncated` is the trainer's to count.
    """

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        spec = (extras or {}).get("reward_spec") or {}
        if "ground_truth" not in spec:
            raise ValueError("a row for beam_math has no reward_spec.ground_truth")
        self._problem = Problem("", "", label(spec["ground_truth"]), symbolic=spec.get("method") != "integer")
        self._graded: Graded | None = None

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Grades the response; the episode is over."""
        self._graded = grade_response(self._problem, action)
        verdict = self._graded.verdict
        correct = verdict is Verdict.correct
        return BaseTextEnvStepOutput(
            observations=[],
            reward=CORRECT_REWARD if correct else WRONG_REWARD,
            done=True,
            metadata={"verdict": verdict.value, "accuracy": float(correct)},
            postprocessed_action=None,
        )

    def get_metrics(self) -> dict[str, Any]:
        """Per episode: 0 or 1 each, which SkyRL averages to shares under `environment/`; verdict and answer as text."""
        if self._graded is None:
            return {}
        verdict, answer = self._graded
        return {
            "accuracy": float(verdict is Verdict.correct),
            "no_answer": float(verdict is Verdict.no_answer),
            "grader_timeout": float(verdict is Verdict.timeout),
            "verdict": verdict.value,
            "answer": answer,
        }


def register() -> None:
    """Makes `beam_math` known to skyrl_gym in this process; calling it again changes nothing."""
    if ENV_CLASS not in registry:
        skyrl_gym.register(id=ENV_CLASS, entry_point=MathEnvironment)
