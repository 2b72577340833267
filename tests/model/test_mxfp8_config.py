"""MXFP8 settings that a model or a layout cannot have die at once, by name; what is quantised is as stated."""

import subprocess
import sys
from typing import Any

import pytest

from beam_rl.model.config import BeamConfig
from beam_rl.model.errors import BadInput
from beam_rl.model.mxfp8_config import Mxfp8Settings
from beam_rl.model.tensors import hf_tensors

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 2,
}


def test_router_norms_embedding_head_and_biases_are_never_quantised() -> None:
    names = hf_tensors(BeamConfig(**SIZES))
    plain = {name for name in names if not Mxfp8Settings().covers(name)}
    assert {name for name in names if not name.endswith("_proj.weight")} == plain
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.gate.weight"} <= plain


@pytest.mark.parametrize(
    ("part", "hits", "misses"),
    [
        ("self_attn.o_proj", "model.layers.2.self_attn.o_proj", "model.layers.2.self_attn.q_proj"),
        ("layers.1", "model.layers.1.self_attn.q_proj.weight", "model.layers.11.self_attn.q_proj.weight"),
        ("mlp.down_proj", "model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.experts.0.down_proj.weight"),
        ("layers.1.mlp.experts", "model.layers.1.mlp.experts.3.up_proj", "model.layers.2.mlp.experts.3.up_proj"),
    ],
)
def test_a_part_of_a_name_leaves_out_what_has_it_and_nothing_else(part: str, hits: str, misses: str) -> None:
    settings = Mxfp8Settings(exclude=(part,))
    assert not settings.covers(hits)
    assert settings.covers(misses)


@pytest.mark.parametrize(
    ("change", "layout", "said"),
    [
        ({"hidden_size": 80}, {}, "hidden_size is 80"),
        ({"intermediate_size": 96}, {"tp": 2}, "intermediate_size is 48 on each rank .tp = 2.*fewer ranks"),
        ({"moe_intermediate_size": 32}, {"etp": 2}, "moe_intermediate_size is 16 on each rank .etp = 2"),
        ({"head_dim": 16}, {}, "head_dim is 16"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, {"tp": 4}, r"num_attention_heads \* head_dim is 48"),
        ({}, {"tp": 4}, r"num_key_value_heads \* head_dim is 16"),
    ],
)
def test_sizes_that_are_not_whole_blocks_are_refused(change: dict[str, Any], layout: dict[str, int], said: str) -> None:
    with pytest.raises(BadInput, match=f"multiples of 32, and {said}.*mxfp8.exclude"):
        Mxfp8Settings().check(BeamConfig(**(SIZES | change)), **layout)


def test_sizes_of_what_is_left_out_do_not_matter() -> None:
    config = BeamConfig(**(SIZES | {"head_dim": 16, "moe_intermediate_size": 40}))
    Mxfp8Settings(exclude=("self_attn", "experts")).check(config)
    Mxfp8Settings().check(BeamConfig(**SIZES), tp=2, etp=2)


@pytest.mark.parametrize("part", ["self_attn.q_proj", "layers.0.mlp.up_proj", "experts.3", "gate_proj"])
def test_half_of_a_fused_gemm_cannot_be_left_out(part: str) -> None:
    with pytest.raises(BadInput, match="same GEMM"):
        Mxfp8Settings(exclude=(part,)).check(BeamConfig(**SIZES))


@pytest.mark.parametrize("part", ["self_attn.out_proj", "layers.3", "lm_head", "mlp.gate", "o_pro"])
def test_a_part_that_is_in_no_name_is_refused(part: str) -> None:
    with pytest.raises(BadInput, match=part):
        Mxfp8Settings(exclude=(part,)).check(BeamConfig(**SIZES))


@pytest.mark.parametrize("wrong", [{"scaling": "even"}, {"exclude": "o_proj"}, {"exclude": [""]}, {"exclude": [3]}])
def test_wrong_values_are_refused_by_key(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=f"mxfp8.{next(iter(wrong))}"):
        Mxfp8Settings(**wrong)


def test_settings_survive_json() -> None:
    settings = Mxfp8Settings("floor", ("self_attn", "layers.0"), activations=False)
    assert Mxfp8Settings(**settings.to_dict()) == settings


def test_reading_a_recipe_costs_no_import_of_torch() -> None:
    code = "import sys, beam_rl.model.mxfp8_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_processes_without_mx_units_import_no_torchao() -> None:
    code = (
        "import sys, torch; from beam_rl.model import mxfp8; from beam_rl.model.mxfp8_config import Mxfp8Settings; "
        "mxfp8.linear(torch.ones(2, 32), torch.ones(4, 32), Mxfp8Settings()); sys.exit('torchao' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
