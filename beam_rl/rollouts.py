"""What a step's rollouts were like, over everything that was sampled, before dynamic sampling chose among it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl.train.generators.base import GeneratorOutput

from beam_rl import dapo


@dataclass
class RolloutStats:
    """Sums over the responses of one training step."""

    rewards: list[float] = field(default_factory=list)
    """Task reward plus overlong penalty."""
    accuracies: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Response tokens."""
    truncated: int = 0
    no_answer: int = 0
    groups: int = 0
    informative: int = 0
    dropped_tokens: int = 0
    """Tokens without a finite rollout log-prob, which are out of the loss."""

    def add(self, output: GeneratorOutput) -> None:
        """Count one generated batch; its rewards are final."""
        self.rewards += rewards(output)
        self.accuracies += accuracies(output)
        self.lengths += [len(response) for response in output["response_ids"]]
        self.truncated += sum(reason == "length" for reason in output["stop_reasons"] or [])
        self.no_answer += sum(bool(row.get("no_answer")) for row in output["env_metrics"] or [])

    def record(self) -> dict[str, Any]:
        """The step record's fields about rollouts."""
        count = max(len(self.lengths), 1)
        return {
            "reward_mean": sum(self.rewards) / count,
            "accuracy": sum(self.accuracies) / count,
            "informative_share": self.informative / max(self.groups, 1),
            "response_length_mean": sum(self.lengths) / count,
            "truncated_share": self.truncated / count,
            "no_answer_share": self.no_answer / count,
            "dropped_tokens": self.dropped_tokens,
        }


def whole_distribution(sampling_params: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters under which the first token may be the end of the response.

    SkyRL forbids that (min_tokens=1), so the rollout's log-prob of every first token lacks the end's share, which the
    trainer's has. A response is never empty anyway: it ends with its end token.
    """
    return sampling_params | {"min_tokens": 0}


def rewards(output: GeneratorOutput) -> list[float]:
    """Reward of every response: SkyRL's environments give it a response, or a token."""
    return [float(sum(reward) if isinstance(reward, list) else reward) for reward in output["rewards"]]


def accuracies(output: GeneratorOutput) -> list[float]:
    """Accuracy of every response: the environment's, or its reward where it reports none."""
    rows = output.get("env_metrics") or [{}] * len(output["rewards"])
    return [float(row.get("accuracy", reward)) for row, reward in zip(rows, rewards(output), strict=True)]


def split_groups(uids: Sequence[str], values: Sequence[float], tolerance: float) -> tuple[list[str], list[str]]:
    """Group ids with a learning signal, and without, each in order of appearance."""
    groups: dict[str, list[float]] = defaultdict(list)
    for uid, value in zip(uids, values, strict=True):
        groups[uid].append(value)
    signal = [uid for uid, group in groups.items() if dapo.informative(group, tolerance)]
    return signal, [uid for uid in groups if uid not in set(signal)]


def indices_of(uids: Sequence[str], groups: Sequence[str]) -> list[int]:
    """Positions of the samples of `groups`, group after group."""
    places: dict[str, list[int]] = defaultdict(list)
    for index, uid in enumerate(uids):
        places[uid].append(index)
    return [index for group in groups for index in places[group]]
