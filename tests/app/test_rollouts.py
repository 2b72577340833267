"""Samples that cannot be trained on leave the loss and are counted; the batch goes on through SkyRL and the trainer."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from skyrl.backends.skyrl_train.inference_servers.generate_wire import decode_packed_routed_experts
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.routed_experts import RoutedExpertTrace
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors, make_router_padding_mask
from skyrl.train.utils.trainer_utils import validate_generator_output

from beam_rl.rollouts import Fault, RolloutStats, complete_aborted, drop_inconsistent, neutral
from beam_rl.trainer.batches import sequences_from_batch
from beam_rl.trainer.replay import CAPTURE_SETTING, RoutesError, Routing
from beam_rl.trainer.sequences import check_sample, pack

SHAPE = (3, 2)
ROUTING = Routing(layers=3, sparse_layers=(1, 2), topk=2, experts=300)
PROMPT, RESPONSES = [7, 8, 9], ([20, 21, 22, 2], [30, 2], [40, 41, 42])


def routes(tokens: int) -> Any:
    generator = np.random.default_rng(tokens)
    return generator.random((tokens, SHAPE[0], 300)).argsort(-1)[..., :2].astype(np.int16)


@pytest.fixture
def output() -> Any:
    """Three good samples of one prompt, as SkyRL's generator returns them; the last one was cut off by its length."""
    return {
        "prompt_token_ids": [list(PROMPT) for _ in RESPONSES],
        "response_ids": [list(response) for response in RESPONSES],
        "rewards": [[0.0] * (len(response) - 1) + [1.0] for response in RESPONSES],
        "loss_masks": [[1] * len(response) for response in RESPONSES],
        "stop_reasons": ["stop", "stop", "length"],
        "rollout_metrics": None,
        "rollout_logprobs": [[-0.5] * len(response) for response in RESPONSES],
        "rollout_expert_indices": [routes(len(PROMPT) + len(response) - 1) for response in RESPONSES],
        "env_metrics": [{"accuracy": 1.0} for _ in RESPONSES],
    }


def trained(output: Any) -> list[torch.Tensor]:
    """Loss masks of the samples after SkyRL's checks and conversion and the trainer's checks and packing."""
    validate_generator_output(len(RESPONSES), output, routes_expected=True)
    rows = [len(array) for array in output["rollout_expert_indices"]]
    sequences, attention, response, _, mask, rollout, indices, _ = convert_prompts_responses_to_batch_tensors(
        0,
        output["prompt_token_ids"],
        output["response_ids"],
        output["rewards"],
        output["loss_masks"],
        output["rollout_logprobs"],
        output["rollout_expert_indices"],
    )
    data = TrainingInputBatch(
        {
            "sequences": sequences,
            "attention_mask": attention,
            "loss_mask": mask,
            "rollout_logprobs": rollout,
            "rollout_expert_indices": indices,
            "router_padding_mask": make_router_padding_mask(attention, rows),
        }
    )
    data.metadata = {"response_length": response.shape[1]}
    samples = sequences_from_batch(data)
    for number, one in enumerate(samples):
        check_sample(number, one, samples[0], ROUTING)
    pack(samples, range(len(samples)), routing=ROUTING)
    return [one.loss_mask for one in samples]


def test_good_samples_are_left_alone(output: Any) -> None:
    """Also a truncated one: its tokens, log-probs and routes belong together."""
    kept = {key: [np.array(value) for value in output[key]] for key in ("loss_masks", "rollout_expert_indices")}
    assert drop_inconsistent(output, SHAPE) == {}
    for key, values in kept.items():
        for value, now in zip(values, output[key], strict=True):
            assert np.array_equal(value, now)
    assert [int(mask.sum()) for mask in trained(output)] == [4, 2, 3]


def spoil_abort(output: Any) -> None:
    output["stop_reasons"][1] = "abort"


def spoil_abort_without_routes(output: Any) -> None:
    output["stop_reasons"][1] = "abort"
    output["rollout_expert_indices"][1] = None


def spoil_abort_with_few_routes(output: Any) -> None:
    output["stop_reasons"][1] = "abort"
    output["rollout_expert_indices"][1] = routes(2)


def spoil_unfinished(output: Any) -> None:
    output["stop_reasons"][1] = None


def spoil_no_tokens(output: Any) -> None:
    for key in ("response_ids", "rewards", "loss_masks", "rollout_logprobs"):
        output[key][1] = []
    output["rollout_expert_indices"][1] = routes(len(PROMPT) - 1)


def spoil_mask(output: Any) -> None:
    output["loss_masks"][1] = [1]


def spoil_short_logprobs(output: Any) -> None:
    output["rollout_logprobs"][1] = [-0.5]


def spoil_no_logprobs(output: Any) -> None:
    output["rollout_logprobs"][1] = None


def spoil_reward(output: Any) -> None:
    output["rewards"][1] = [0.0, math.nan]


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (spoil_abort, Fault.aborted),
        (spoil_abort_without_routes, Fault.aborted),
        (spoil_abort_with_few_routes, Fault.aborted),
        (spoil_unfinished, Fault.aborted),
        (spoil_no_tokens, Fault.no_tokens),
        (spoil_mask, Fault.mask_length),
        (spoil_short_logprobs, Fault.logprobs_length),
        (spoil_no_logprobs, Fault.logprobs_length),
        (spoil_reward, Fault.reward),
    ],
)
def test_an_inconsistent_sample_is_dropped_by_name_and_the_others_train(spoil: Any, fault: Fault, output: Any) -> None:
    spoil(output)
    assert drop_inconsistent(output, SHAPE) == {1: fault}
    assert [int(mask.sum()) for mask in trained(output)] == [4, 0, 3]


@pytest.mark.parametrize("rows", [None, 0, 3, 6])
def test_missing_routes_of_a_finished_request_stop_the_run_and_name_the_setting(rows: int | None, output: Any) -> None:
    output["rollout_expert_indices"][1] = None if rows is None else routes(rows)
    with pytest.raises(RoutesError, match=f"sample 1 .*{CAPTURE_SETTING}"):
        drop_inconsistent(output, SHAPE)


def test_routes_of_another_model_stop_the_run(output: Any) -> None:
    with pytest.raises(RoutesError, match="sample 0"):
        drop_inconsistent(output, (4, 2))


def test_no_routes_at_all_stop_the_run_at_the_first_sample(output: Any) -> None:
    output["rollout_expert_indices"] = None
    with pytest.raises(RoutesError, match=f"sample 0 .*{CAPTURE_SETTING}"):
        drop_inconsistent(output, SHAPE)


def test_a_batch_of_aborted_requests_alone_trains_nothing_and_goes_on(output: Any) -> None:
    output["stop_reasons"], output["rollout_expert_indices"] = ["abort"] * 3, None
    assert drop_inconsistent(output, SHAPE) == dict.fromkeys(range(3), Fault.aborted)
    assert not any(mask.any() for mask in trained(output))


def test_without_r3_nobody_asks_for_routes(output: Any) -> None:
    output["rollout_expert_indices"] = None
    assert drop_inconsistent(output, None) == {}


def test_a_stop_token_that_the_engine_never_saw_needs_no_route(output: Any) -> None:
    """SkyRL puts one behind a stop string, without weight in the loss: two tokens more than rows."""
    output["response_ids"][0].append(2)
    output["rewards"][0].append(0.0)
    output["loss_masks"][0].append(0)
    output["rollout_logprobs"][0].append(0.0)
    assert drop_inconsistent(output, SHAPE) == {}
    assert [int(mask.sum()) for mask in trained(output)] == [4, 2, 3]


@pytest.mark.parametrize("tokens", [[], [50, 51]])
@pytest.mark.parametrize("start", [None, 2])
def test_an_aborted_request_passes_through_skyrls_client(tokens: list[int], start: int | None) -> None:
    """vLLM answers it without routes, SkyRL's client would fail on it, and with it the whole step."""
    sampling = {"logprobs": 0} | ({} if start is None else {"routed_experts_prompt_start": start})
    request = {"token_ids": PROMPT, "sampling_params": sampling}
    content = [{"logprob": -1.0} for _ in tokens]
    answer = {"choices": [{"token_ids": tokens, "finish_reason": "abort", "logprobs": {"content": content}}]}
    (choice,) = complete_aborted(request, answer, SHAPE)["choices"]
    size = len(choice["token_ids"])
    assert size == max(len(tokens), 1)
    assert len(choice["logprobs"]["content"]) == size
    trace = RoutedExpertTrace()
    if start is not None:
        trace.record_generation(prompt_token_count=1, generated_token_count=start, routed_experts=routes(start))
    trace.record_generation(
        prompt_token_count=len(PROMPT),
        generated_token_count=size,
        routed_experts=decode_packed_routed_experts(choice["routed_experts"]),
    )


def test_other_answers_keep_what_they_lack() -> None:
    """A finished request without routes is a wrong setting, which must show."""
    answer = {"choices": [{"token_ids": [1], "finish_reason": "stop", "logprobs": None, "routed_experts": None}]}
    assert complete_aborted({"token_ids": PROMPT, "sampling_params": {}}, answer, SHAPE) is answer
    assert answer["choices"][0]["routed_experts"] is None


def test_a_dropped_sample_makes_no_group_informative_and_moves_no_mean() -> None:
    uids = ["a", "a", "a", "b", "b", "c"]
    values = neutral([1.0, 0.0, 1.0, 1.0, -1.0, -1.0], uids, {1: Fault.aborted, 5: Fault.no_tokens})
    assert values == [1.0, 1.0, 1.0, 1.0, -1.0, 0.0]


def test_dropped_samples_are_counted_by_reason() -> None:
    stats = RolloutStats()
    for faults in ({0: Fault.aborted, 4: Fault.reward}, {2: Fault.aborted}):
        stats.dropped_samples.update(faults.values())
    record = stats.record()
    assert record["dropped_samples"] == 3
    assert record["dropped_samples_by_reason"] == {"aborted": 2, "reward": 1}
