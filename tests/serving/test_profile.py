"""A setting that a platform cannot honour is named, never dropped in silence."""

import importlib.util
from dataclasses import fields
from pathlib import Path

import pytest

from beam_rl.model.errors import BadInput
from beam_rl.rollout.serve_profile import ServeProfile

EVERYTHING = ServeProfile(
    kv_cache_dtype="fp8",
    tensor_parallel_size=8,
    enable_expert_parallel=True,
    speculative_config={"method": "dflash", "model": "drafter", "num_speculative_tokens": 7},
    max_model_len=4096,
    max_num_seqs=64,
)


def test_the_cpu_names_every_setting_it_loses() -> None:
    args, lost = EVERYTHING.engine_args("cpu")
    for field in fields(ServeProfile):
        named = any(line.startswith(field.name) for line in lost)
        honoured = args.get(field.name) == getattr(EVERYTHING, field.name)
        assert named != honoured, field.name
    assert ServeProfile().engine_args("cpu")[1] != [], "the parsers are not in vLLM for CPUs"


def test_a_gpu_gets_all_of_it() -> None:
    args, lost = EVERYTHING.engine_args("gpu")
    assert lost == []
    assert args.items() >= {field.name: getattr(EVERYTHING, field.name) for field in fields(ServeProfile)}.items()
    assert args["enable_auto_tool_choice"] is True


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
    with pytest.raises(BadInput, match="unknown: kv_dtype; known are enable_expert_parallel"):
        ServeProfile.named(str(path))
    path.write_text("max_num_seqs: 8\n")
    assert ServeProfile.named(str(path)) == ServeProfile(max_num_seqs=8)
    with pytest.raises(BadInput, match="neither 'beam' nor a file"):
        ServeProfile.named("fast")
