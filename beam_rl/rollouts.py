"""What a step's rollouts were like, over everything that was sampled, before dynamic sampling chose among it.

And which of them can be trained on: a sample whose tokens, log-probs and routes do not belong together is taken out
of the loss and counted by reason (`drop_inconsistent`). It keeps its place, because groups have a fixed size.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from skyrl.backends.skyrl_train.inference_servers.generate_wire import PackedField, pack_routed_experts
from skyrl.train.generators.base import GeneratorOutput

from beam_rl import dapo
from beam_rl.trainer.replay import CAPTURE_SETTING, RoutesError

INTERRUPTED = ("abort", "error", None)
"""Stop reasons of a request that ended before its response did."""


class Fault(StrEnum):
    """Why a sample is not trained on."""

    aborted = "aborted"
    """The engine gave the request up, for instance when it was paused: its last token is nobody's choice of an end."""
    no_tokens = "no_tokens"
    mask_length = "mask_length"
    logprobs_length = "logprobs_length"
    """Fewer or more rollout log-probs than response tokens: they cannot be told which token they are of."""
    reward = "reward"
    """The reward is not a finite number."""


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
    dropped_samples: Counter[str] = field(default_factory=Counter)
    """Samples out of the loss, by `Fault`."""

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
            "dropped_samples": self.dropped_samples.total(),
            "dropped_samples_by_reason": dict(self.dropped_samples),
        }


def whole_distribution(sampling_params: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters under which the first token may be the end of the response.

    SkyRL forbids that (min_tokens=1), so the rollout's log-prob of every first token lacks the end's share, which the
    trainer's has. A response is never empty anyway: it ends with its end token.
    """
    return sampling_params | {"min_tokens": 0}


def rewards(output: GeneratorOutput) -> list[float]:
    """Reward of every response."""
    return [whole_reward(reward) for reward in output["rewards"]]


def whole_reward(reward: float | list[float]) -> float:
    """A response's reward: SkyRL's environments give it as one number, or by token."""
    return float(sum(reward) if isinstance(reward, list) else reward)


def accuracies(output: GeneratorOutput) -> list[float]:
    """Accuracy of every response: the environment's, or its reward where it reports none."""
    rows = output.get("env_metrics") or [{}] * len(output["rewards"])
    return [float(row.get("accuracy", reward)) for row, reward in zip(rows, rewards(output), strict=True)]


def split_groups(uids: Sequence[str], values: Sequence[float], tolerance: float) -> tuple[list[str], list[str]]:
    """Group ids with a learning signal, and without, each in order of appearance."""
    groups: dict[str, list[float]] = defaultdict(list)
    for uid, value in zip(uids, values, strict=True):
        groups[uid].append(value)
    signal = {uid: dapo.informative(group, tolerance) for uid, group in groups.items()}
    return [uid for uid in signal if signal[uid]], [uid for uid in signal if not signal[uid]]


def indices_of(uids: Sequence[str], groups: Sequence[str]) -> list[int]:
    """Positions of the samples of `groups`, group after group."""
    places: dict[str, list[int]] = defaultdict(list)
    for index, uid in enumerate(uids):
        places[uid].append(index)
    return [index for group in groups for index in places[group]]


def drop_inconsistent(output: GeneratorOutput, route_shape: tuple[int, int] | None) -> dict[int, Fault]:
    """Take the samples that cannot be trained on out of the loss, in place.

    Their loss mask becomes 0 and their other fields are made to fit their tokens, so that they pass through SkyRL's
    and the trainer's checks. An empty response gets a token that nobody sampled. Their reward still counts in their
    group: see `neutral`.

    Args:
        output: the generator's, before SkyRL validates it.
        route_shape: (layers, topk) of a model whose routes are replayed (R3); None without R3.

    Returns:
        the fault of each sample dropped, by its index.

    Raises:
        RoutesError: a request that ended by itself has no route for an input token of a trained one. The rollout
            engine's settings are wrong then, and every sample would be dropped.
    """
    dropped: dict[int, Fault] = {}
    stops = output["stop_reasons"] or [None] * len(output["response_ids"])
    routes = output.get("rollout_expert_indices")
    if route_shape is not None and routes is None:
        routes = output["rollout_expert_indices"] = [None] * len(stops)
    for index, stop in enumerate(stops):
        prompt, response = output["prompt_token_ids"][index], output["response_ids"][index]
        fault = sample_fault(output, index, stop)
        if route_shape is not None and fault is not Fault.aborted:
            assert routes is not None
            check_routes(index, routes[index], len(prompt), output["loss_masks"][index], route_shape)
        if fault is None:
            continue
        dropped[index] = fault
        if not response:
            response = output["response_ids"][index] = [prompt[-1]]
        size = len(response)
        output["loss_masks"][index] = [0] * size
        if output.get("rollout_logprobs") is not None:
            output["rollout_logprobs"][index] = [0.0] * size
        reward = output["rewards"][index]
        total = 0.0 if fault is Fault.reward else whole_reward(reward)
        output["rewards"][index] = [*[0.0] * (size - 1), total] if isinstance(reward, list) else total
        if route_shape is not None:
            assert routes is not None
            routes[index] = fitted_routes(routes[index], len(prompt) + size - 1, route_shape)
    return dropped


def sample_fault(output: GeneratorOutput, index: int, stop: str | None) -> Fault | None:
    """What is wrong with a sample apart from its routes; None where nothing is."""
    size = len(output["response_ids"][index])
    logprobs = output.get("rollout_logprobs")
    if stop in INTERRUPTED:
        return Fault.aborted
    if size == 0:
        return Fault.no_tokens
    if len(output["loss_masks"][index]) != size:
        return Fault.mask_length
    if logprobs is not None and len(logprobs[index] or ()) != size:
        return Fault.logprobs_length
    reward = output["rewards"][index]
    values = reward if isinstance(reward, list) else [reward]
    if not all(math.isfinite(value) for value in values) or (isinstance(reward, list) and len(values) != size):
        return Fault.reward
    return None


def check_routes(
    index: int, routes: NDArray[Any] | None, prompt: int, mask: Sequence[int], shape: tuple[int, int]
) -> None:
    """Raise `RoutesError` unless every trained token's prediction has its row in routes [rows, layers, topk].

    Row t is of input token t. A response's last token is no input, and a stop token that was put behind a stop string
    was not sampled: neither has a row. What the rows say is checked where they are replayed.
    """
    if routes is None:
        raise RoutesError(f"sample {index} has no routes: set {CAPTURE_SETTING}=true, or beam.r3=false")
    trained = [place for place, weight in enumerate(mask) if weight]
    least = prompt + trained[-1] if trained else 0
    most = prompt + len(mask)
    if routes.shape[1:] != shape or not least <= len(routes) <= most:
        raise RoutesError(
            f"sample {index} has routes {list(routes.shape)} for {most} tokens: expected [{most - 1}, {shape[0]},"
            f" {shape[1]}] ({CAPTURE_SETTING}); check the rollout engine's cache settings, or set beam.r3=false"
        )


def fitted_routes(routes: NDArray[Any] | None, rows: int, shape: tuple[int, int]) -> NDArray[Any]:
    """Routes [rows, layers, topk] of a sample that nobody trains on: its own as far as they go, then any experts."""
    filler = np.broadcast_to(np.arange(shape[1], dtype=np.uint8), (rows, *shape))
    if routes is None or routes.shape[1:] != shape:
        return filler.copy()
    return np.concatenate((routes[:rows], filler[len(routes) :].astype(routes.dtype)))


def complete_aborted(
    request: Mapping[str, Any], response: dict[str, Any], route_shape: tuple[int, int] | None
) -> dict[str, Any]:
    """An answer of SkyRL's generate endpoint, completed in place if its request was aborted; other answers as they are.

    An aborted request has no routes, and perhaps no token: SkyRL's client would fail, and the whole step with it. The
    stop reason stays, by which `drop_inconsistent` knows the sample.
    """
    choice = response["choices"][0]
    if choice["finish_reason"] not in INTERRUPTED:
        return response
    prompt = request["token_ids"]
    if not choice["token_ids"]:
        choice["token_ids"] = [prompt[-1]]
    missing = len(choice["token_ids"]) - len((choice.get("logprobs") or {}).get("content", ()))
    if request["sampling_params"].get("logprobs") is not None and missing:
        choice["logprobs"] = {"content": [{"logprob": 0.0} for _ in choice["token_ids"]]}
    if route_shape is not None:
        start = request["sampling_params"].get("routed_experts_prompt_start") or 0
        rows = len(prompt) - start + len(choice["token_ids"]) - 1
        choice[PackedField.ROUTED_EXPERTS.value] = pack_routed_experts(fitted_routes(None, rows, route_shape))
    return response


def neutral(values: Sequence[float], uids: Sequence[str], dropped: Mapping[int, Fault]) -> list[float]:
    """Values of samples with a dropped one's replaced by the mean of the others in its group, or 0 if there are none.

    So a dropped sample moves neither its group's mean nor the range by which the group counts as informative. It does
    narrow the group's standard deviation: of n members, k of them kept, by sqrt((k - 1) / (n - 1)).
    """
    kept: dict[str, list[float]] = defaultdict(list)
    for index, (uid, value) in enumerate(zip(uids, values, strict=True)):
        if index not in dropped:
            kept[uid].append(value)
    return [
        value if index not in dropped else sum(kept[uid]) / max(len(kept[uid]), 1)
        for index, (uid, value) in enumerate(zip(uids, values, strict=True))
    ]
