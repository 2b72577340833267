"""Engine settings that give wrong rollouts are refused with the key and the remedy."""

from typing import Any

import pytest

from beam_rl.model.errors import BadInput
from beam_rl.rollout.profile import check_engine, engine_init_kwargs

SOUND: dict[str, Any] = {
    "enable_return_routed_experts": True,
    "enable_prefix_caching": True,
    "enforce_eager": True,
    "pipeline_parallel_size": 1,
    "engine_init_kwargs": engine_init_kwargs("cpu"),
}

ALWAYS: list[dict[str, Any]] = [
    {"quantization": "fp8"},
    {"fp8_weight_sync_mode": "online"},
    {"engine_init_kwargs": {"logprobs_mode": "raw_logprobs"}},
    {"engine_init_kwargs": {"kv_cache_dtype": "fp8"}},
    {"engine_init_kwargs": {"load_format": "dummy"}},
]
WITH_CAPTURE: list[dict[str, Any]] = [
    {"enable_prefix_caching": False},
    {"pipeline_parallel_size": 2},
    {"engine_init_kwargs": {"decode_context_parallel_size": 2}},
    {"engine_init_kwargs": {"kv_transfer_config": {"kv_connector": "NixlConnector"}}},
    {"speculative_config": {"method": "dflash", "enable_adaptive_verification": True}},
]
ON_CPU: list[dict[str, Any]] = [
    {"enforce_eager": False},
    {"speculative_config": {"method": "ngram"}},
    {"engine_init_kwargs": {"block_size": 16}},
    {"engine_init_kwargs": {"enable_sleep_mode": True}},
    {"engine_init_kwargs": {"enable_lora": True}},
]


def name_of(change: dict[str, Any]) -> str:
    ((key, value),) = change.items()
    return next(iter(value)) if key == "engine_init_kwargs" else key


def test_log_probs_are_of_the_distribution_sampled_from() -> None:
    for device in ("cpu", "gpu"):
        assert engine_init_kwargs(device)["logprobs_mode"] == "processed_logprobs"


def test_sound_settings_pass() -> None:
    check_engine(SOUND, "cpu")
    check_engine(SOUND | {"engine_init_kwargs": engine_init_kwargs("gpu"), "enforce_eager": False}, "gpu")
    check_engine({}, "gpu")


@pytest.mark.parametrize("change", ALWAYS + WITH_CAPTURE + ON_CPU, ids=name_of)
def test_unsound_settings_are_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=f"^generator.inference_engine.*{name_of(change)}=.*(Set|Remove|Turn|turn)"):
        check_engine(SOUND | change, "cpu")


@pytest.mark.parametrize("change", WITH_CAPTURE, ids=name_of)
def test_without_r3_its_rules_do_not_bind(change: dict[str, Any]) -> None:
    check_engine(SOUND | change | {"enable_return_routed_experts": False}, "gpu")


@pytest.mark.parametrize(("separate", "backend"), [(False, "beam_ipc"), (True, "beam_nccl")])
def test_the_transport_on_gpus_follows_from_where_the_trainer_is(separate: bool, backend: str) -> None:
    assert engine_init_kwargs("gpu", separate=separate)["weight_transfer_config"] == {"backend": backend}
    assert engine_init_kwargs("cpu", separate=separate) == engine_init_kwargs("cpu")
