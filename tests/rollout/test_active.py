"""A fast path that an engine does not take is said not to be taken, and for the right reason."""

import asyncio
from typing import Any

import pytest

from beam_rl.rollout import active as report
from beam_rl.rollout.active import lines, paths

HOPPER: dict[str, Any] = {
    "native": True,
    "model": "vllm.models.beam.nvidia.model.BeamForCausalLM",
    "dtype": "bfloat16",
    "tp": 1,
    "dp": 1,
    "ep": False,
    "kv_dtype": "auto",
    "prefix_caching": True,
    "chunked_prefill": True,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 256,
    "async_scheduling": True,
    "logprobs_mode": "processed_logprobs",
    "capture": True,
    "graphs": "FULL_AND_PIECEWISE",
    "eager": False,
    "largest_graph": 512,
    "breakable": True,
    "draft": None,
    "device": "NVIDIA H200",
    "capability": 9,
    "hidden": 2048,
    "kv_heads": 4,
    "merged": True,
    "projection": [4608, 2048],
    "quantised": False,
    "low_latency": False,
    "backend": "FLASH_ATTN",
    "kv_fusible": True,
    "kv_stored": "bfloat16",
    "flashinfer": False,
    "reduce_kernel": True,
    "reduce_fused": False,
    "moe": "TritonExperts",
    "moe_backend": "TRITON",
    "router": [],
    "moe_config": "E=64,N=768,device_name=NVIDIA_H200.json",
    "moe_config_file": None,
}
"""A plain bfloat16 engine on one H200."""


def said(name: str, **changed: Any) -> tuple[bool, str]:
    """Whether a path is active, and its detail, on the H200 with some facts changed."""
    path = next(path for path in paths(HOPPER | changed) if path.name == name)
    return path.active, path.detail


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"tp": 1}, "one device"),
        ({"tp": 6}, "is not 2, 4 or 8"),
        ({"tp": 8, "dtype": "float32"}, "bfloat16 only"),
        ({"tp": 8, "hidden": 2560}, "not a multiple of 1,024"),
        ({"tp": 8, "reduce_kernel": False}, "no kernel"),
        ({"tp": 8}, "FlashInfer is not installed"),
        ({"tp": 8, "flashinfer": True, "capability": 8}, "Hopper or Blackwell only"),
        ({"tp": 8, "flashinfer": True}, "not all ranks have NVLink multicast"),
    ],
)
def test_the_all_reduce_names_the_condition_that_fails(changed: dict[str, Any], why: str) -> None:
    active, detail = said("all-reduce in the norms' kernel", **changed)
    assert not active
    assert why in detail
    assert said("all-reduce in the norms' kernel", **(changed | {"reduce_fused": True}))[0]


def test_an_fp8_cache_is_said_to_cost_the_fused_write() -> None:
    name = "KV written by the norm's kernel"
    assert said(name)[0]
    active, detail = said(name, kv_dtype="fp8", kv_stored="float8_e4m3fn")
    assert not active
    assert "the KV cache is fp8" in detail


@pytest.mark.parametrize(
    ("dtype", "active", "detail"),
    [
        ("auto", False, "bfloat16, the model's type"),
        ("bfloat16", False, "bfloat16"),
        ("fp8", True, "fp8"),
        ("fp8_e4m3", True, "fp8_e4m3"),
    ],
)
def test_only_an_8_bit_cache_is_called_one(dtype: str, active: bool, detail: str) -> None:
    assert said("8-bit KV cache", kv_dtype=dtype) == (active, detail)


def test_a_missing_table_is_named_with_its_remedy() -> None:
    active, detail = said("tuned MoE configuration")
    assert not active
    assert "E=64,N=768,device_name=NVIDIA_H200.json" in detail
    assert "tune-moe" in detail
    assert said("tuned MoE configuration", moe_config_file="/tables/E=64.json") == (True, "/tables/E=64.json")


def test_blackwells_kernels_are_not_claimed_elsewhere() -> None:
    assert "NVIDIA H200" in said("low-latency projection GEMM")[1]
    assert not said("CuteDSL attention kernels")[0]
    assert said("CuteDSL attention kernels", capability=10)[0]
    assert "none for [4608, 2048]" in said("low-latency projection GEMM", capability=10)[1]


def test_speculation_and_graphs_are_told_as_they_run() -> None:
    assert said("speculation") == (False, "no drafter")
    drafted = {"draft": "dflash", "drafter": "DFlash2BeamForCausalLM", "draft_tokens": 7}
    assert "all verified" in said("speculation", **drafted, adaptive=False)[1]
    assert "as many verified as pay" in said("speculation", **drafted, adaptive=True)[1]
    assert said("CUDA graphs", graphs="NONE", eager=True) == (False, "enforce_eager")


def test_without_vllms_own_beam_only_the_engine_is_told() -> None:
    general = {name: HOPPER[name] for name in list(HOPPER)[: list(HOPPER).index("device")]}
    told = lines([general | {"native": False, "model": "beam_rl.rollout.portable.BeamForCausalLM", "graphs": "NONE"}])
    assert told[0].startswith("off vLLM's own Beam")
    assert not any("MoE" in line for line in told)


class Silent:
    """An engine that never answers."""

    async def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        await asyncio.Event().wait()
        raise AssertionError(method)


def test_an_engine_that_does_not_answer_stops_no_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "REPORT_SECONDS", 0.01)
    asyncio.run(asyncio.wait_for(report.announce(Silent()), 20))
    assert "could not be found out: no answer within 0.01 s" in capsys.readouterr().out
