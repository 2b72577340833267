"""A setting that a platform cannot honour is named, never dropped in silence."""

import importlib.util
from dataclasses import fields, replace
from pathlib import Path

import pytest

from beam_rl.model.errors import BadInput
from beam_rl.rollout.serve_profile import OURS, ServeProfile

EVERYTHING = ServeProfile(
    kv_cache_dtype="fp8",
    enable_prefix_caching=True,
    enable_chunked_prefill=True,
    tensor_parallel_size=8,
    enable_expert_parallel=True,
    speculative_config={"method": "ngram", "num_speculative_tokens": 7},
    max_model_len=4096,
    max_num_seqs=64,
    max_num_batched_tokens=4096,
    performance_mode="throughput",
    moe_configs="tables",
)
DRAFTED = replace(
    EVERYTHING,
    tensor_parallel_size=1,
    data_parallel_size=8,
    speculative_config=None,
    drafter="/models/drafter",
    draft_tokens=7,
    adaptive_verification=True,
)


@pytest.mark.parametrize("profile", [EVERYTHING, DRAFTED])
def test_the_cpu_names_every_setting_it_loses(profile: ServeProfile) -> None:
    args, lost = profile.engine_args("cpu")
    for field in fields(ServeProfile):
        named = any(line.startswith(field.name) for line in lost)
        honoured = (args.get(field.name) or None) == (getattr(profile, field.name) or None)  # 0 and False ask nothing
        assert named != honoured, field.name
    assert profile.environment("cpu") == {}
    assert ServeProfile().engine_args("cpu")[1] != [], "the parsers are not in vLLM for CPUs"


def test_a_gpu_gets_all_of_it() -> None:
    args, lost = EVERYTHING.engine_args("gpu")
    assert lost == []
    names = [field.name for field in fields(ServeProfile) if field.name not in OURS]
    assert args.items() >= {name: getattr(EVERYTHING, name) for name in names}.items()
    assert args["enable_auto_tool_choice"] is True
    assert not args.keys() & set(OURS)
    assert EVERYTHING.environment("gpu") == {"VLLM_TUNED_CONFIG_FOLDER": "tables"}
    assert ServeProfile(constrain_output=False).environment("gpu") == {"VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT": "0"}


def test_a_drafter_becomes_speculation_and_its_absence_is_named() -> None:
    for name, adaptive in (("latency", False), ("throughput", True)):
        profile = ServeProfile.named(name)
        args, lost = profile.engine_args("gpu")
        assert "speculative_config" not in args
        assert [line.split()[0].rstrip(":") for line in lost] == (
            ["draft_tokens", "adaptive_verification"] if adaptive else ["draft_tokens"]
        )
        args, lost = replace(profile, drafter="/models/drafter").engine_args("gpu")
        assert lost == []
        assert args["speculative_config"] == {
            "method": "dflash",
            "model": "/models/drafter",
            "num_speculative_tokens": 7,
            "attention_backend": "FLASH_ATTN",
            "enable_adaptive_verification": adaptive,
        }
    assert ServeProfile().engine_args("gpu")[1] == [], "the profile beam asks for no drafter"
    (line,) = ServeProfile(adaptive_verification=True).engine_args("gpu")[1]
    assert line == "adaptive_verification: there are no draft tokens to verify"


def test_a_user_who_waits_gets_no_setting_that_serves_the_crowd() -> None:
    """vLLM's fused write of KV is for bfloat16 caches, and a long step makes running requests wait."""
    latency, throughput = (ServeProfile.named(name).engine_args("gpu")[0] for name in ("latency", "throughput"))
    assert (latency["kv_cache_dtype"], throughput["kv_cache_dtype"]) == ("auto", "fp8")
    assert (latency["performance_mode"], throughput["performance_mode"]) == ("interactivity", "throughput")
    assert "enable_expert_parallel" not in latency
    assert throughput["enable_expert_parallel"] is True
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        assert latency[name] < throughput[name]


def test_settings_that_exclude_each_other_are_refused() -> None:
    refused = {
        "remove one of them": replace(DRAFTED, speculative_config={"method": "ngram"}),
        "speculative_config and draft_tokens": replace(EVERYTHING, draft_tokens=7),
        "speculative_config and adaptive_verification": replace(EVERYTHING, adaptive_verification=True),
        "draft_tokens must be at least 1": replace(DRAFTED, draft_tokens=0),
        "vLLM's Beam refuses the three": replace(DRAFTED, tensor_parallel_size=2),
    }
    for message, profile in refused.items():
        with pytest.raises(BadInput, match=message):
            profile.engine_args("gpu")


def test_vllm_for_cpus_still_has_no_parsers_for_beam() -> None:
    """When this fails, `serve_profile` need not take them away any more."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    assert not [*root.glob("reasoning/*beam*"), *root.glob("tool_parsers/*beam*")]


def test_unknown_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text("max_num_seqs: 8\nkv_dtype: fp8\n")
    with pytest.raises(BadInput, match="unknown: kv_dtype; known are adaptive_verification, constrain_output"):
        ServeProfile.named(str(path))
    path.write_text("max_num_seqs: 8\n")
    assert ServeProfile.named(str(path)) == ServeProfile(max_num_seqs=8)
    with pytest.raises(BadInput, match="neither 'beam', 'latency', 'throughput' nor a file"):
        ServeProfile.named("fast")
