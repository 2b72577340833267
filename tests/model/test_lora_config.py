"""LoRA settings that cannot work die by name, and a target means what PEFT means by it."""

from typing import Any

import pytest

from beam_rl.model.config import BeamConfig
from beam_rl.model.errors import BadInput
from beam_rl.model.lora_config import PROJECTIONS, LoraConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0),
        ("r", 8.0),
        ("r", True),
        ("lora_alpha", 0),
        ("lora_alpha", float("inf")),
        ("lora_alpha", "16"),
        ("lora_dropout", 1.0),
        ("lora_dropout", -0.1),
        ("init_lora_weights", False),
        ("init_lora_weights", "pissa"),
        ("use_rslora", 1),
        ("target_modules", []),
        ("target_modules", "q_proj"),
    ],
)
def test_a_bad_value_is_refused_with_its_name(field: str, value: Any) -> None:
    with pytest.raises(BadInput, match=rf"lora\.{field} is "):
        LoraConfig(**{field: value})


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("gate", "router"),
        ("mlp.gate", "router"),
        ("model.layers.3.mlp.gate.weight", "router"),
        ("e_score_correction_bias", "router"),
        ("q_norm", "norms"),
        ("input_layernorm", "norms"),
        ("embed_tokens", "embedding"),
        ("lm_head", "output layer"),
        ("qproj", "did you mean q_proj"),
        ("mlp.experts", "no such projection"),
        ("all-linear", "known are q_proj"),
        (3, "no such projection"),
    ],
)
def test_a_module_that_cannot_be_adapted_is_refused_with_the_reason(target: Any, reason: str) -> None:
    with pytest.raises(BadInput, match=rf"lora\.target_modules is {target!r}: .*{reason}"):
        LoraConfig(target_modules=("q_proj", target))


def test_a_target_stands_for_every_module_that_ends_in_it() -> None:
    assert LoraConfig().projections == PROJECTIONS
    expected = {
        "gate_proj": ("self_attn.gate_proj", "mlp.gate_proj", "mlp.experts.gate_proj"),
        "self_attn.gate_proj": ("self_attn.gate_proj",),
        "mlp.gate_proj": ("mlp.gate_proj",),
        "experts.gate_proj": ("mlp.experts.gate_proj",),
        "mlp.experts.gate_proj": ("mlp.experts.gate_proj",),
        "o_proj": ("self_attn.o_proj",),
    }
    for target, projections in expected.items():
        assert LoraConfig(target_modules=[target]).projections == projections  # type: ignore[arg-type]


def test_scale_is_peft_s() -> None:
    assert LoraConfig(r=16, lora_alpha=32).scale == 2
    assert LoraConfig(r=16, lora_alpha=32, use_rslora=True).scale == 8


def test_a_target_that_the_model_has_not_is_refused(small: BeamConfig) -> None:
    dense = BeamConfig(**(small.to_dict() | {"mlp_layer_types": ["dense"] * 4}))
    sparse = BeamConfig(**(small.to_dict() | {"mlp_layer_types": ["sparse"] * 4}))
    LoraConfig(r=3).check(dense)
    LoraConfig().check(sparse)
    with pytest.raises(BadInput, match=r"lora\.target_modules is 'experts.up_proj'.*no layer with experts"):
        LoraConfig(target_modules=("q_proj", "experts.up_proj")).check(dense)
    with pytest.raises(BadInput, match=r"lora\.target_modules is 'mlp.up_proj'.*no layer with dense MLP"):
        LoraConfig(target_modules=("mlp.up_proj",)).check(sparse)


def test_a_rank_that_grouped_gemm_does_not_take_is_refused_on_experts_only(small: BeamConfig) -> None:
    LoraConfig(r=4, target_modules=("q_proj", "mlp.up_proj")).check(small)
    with pytest.raises(BadInput, match=r"lora\.r is 4: on experts it must be a multiple of 8"):
        LoraConfig(r=4, target_modules=("q_proj", "up_proj")).check(small)
