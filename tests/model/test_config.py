"""Beam's configuration: every field of the reference's is honoured, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from beam_rl.model.config import BeamConfig, load_config, register
from beam_rl.model.errors import BadInput

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("attention_bias", {"attention_bias": True}),
    ("attention_dropout", {"attention_dropout": 0.1}),
    ("hidden_act", {"hidden_act": "gelu"}),
    ("tie_word_embeddings", {"tie_word_embeddings": True}),
    ("is_encoder_decoder", {"is_encoder_decoder": True}),
    ("quantization_config", {"quantization_config": {"quant_method": "fp8"}}),
    ("num_hidden_layers", {"num_hidden_layers": -1, "layer_types": [], "mlp_layer_types": []}),
    ("num_attention_heads", {"num_attention_heads": 12}),
    ("head_dim", {"head_dim": 33}),
    ("layer_types", {"layer_types": ["full_attention"]}),
    ("layer_types", {"layer_types": ["linear_attention"] * 52}),
    ("mlp_layer_types", {"mlp_layer_types": ["sparse"] * 51}),
    ("sliding_window", {"sliding_window": None}),
    ("rope_parameters", {"rope_parameters": {"full_attention": None}}),
    ("rope_parameters", {"rope_parameters": ROPE}),
    (
        "rope_parameters.sliding_attention.rope_type",
        {"rope_parameters": {"sliding_attention": {**ROPE, "rope_type": "yarn"}, "full_attention": None}},
    ),
    (
        "rope_parameters.sliding_attention.partial_rotary_factor",
        {"rope_parameters": {"sliding_attention": {**ROPE, "partial_rotary_factor": 0.5}, "full_attention": None}},
    ),
    ("n_group", {"n_group": 7}),
    ("n_group", {"n_group": None}),
    ("n_group", {"n_group": 256}),
    ("topk_group", {"topk_group": 9}),
    ("topk_group", {"topk_group": None}),
    ("num_experts_per_tok", {"num_experts_per_tok": 129}),
    ("routed_scaling_factor", {"routed_scaling_factor": float("nan")}),
    ("final_logit_softcapping", {"final_logit_softcapping": 0.0}),
]


@pytest.mark.parametrize(("field", "values"), REFUSED)
def test_unsupported_value_is_refused_by_name(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=f"Beam config: {field} = "):
        BeamConfig(**values)


def test_defaults_are_the_published_models() -> None:
    config = BeamConfig()
    assert config.sparse_layers == tuple(range(3, 52))
    full = [i for i, kind in enumerate(config.layer_types or ()) if kind == "full_attention"]
    assert full == [5, 11, 17, 23, 29, 35, 41, 47, 51]
    assert (config.layer_window(0), config.layer_rope_theta(0)) == (512, 10_000.0)
    assert (config.layer_window(5), config.layer_rope_theta(5)) == (None, None)


def test_position_encoding_follows_the_layers_type() -> None:
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2}
    rope = {"full_attention": {**ROPE, "rope_theta": 500.0}, "sliding_attention": None}
    config = BeamConfig(**kinds, rope_parameters=rope)
    assert (config.layer_rope_theta(0), config.layer_rope_theta(1)) == (500.0, None)


def test_uniform_layers_keep_their_rope_parameters() -> None:
    """The generic validation of transformers would add keys to a mapping that it takes for a flat one."""
    rope = {"full_attention": None, "sliding_attention": dict(ROPE)}
    config = BeamConfig(num_hidden_layers=1, layer_types=["full_attention"], rope_parameters=rope)
    assert config.rope_parameters == {"full_attention": None, "sliding_attention": ROPE}


def test_registering_twice_is_harmless(golden: Callable[[str], Path]) -> None:
    register()
    register()
    assert isinstance(AutoConfig.from_pretrained(golden("tiny")), BeamConfig)


def test_saved_config_loads_equal(tmp_path: Path) -> None:
    config = BeamConfig(num_hidden_layers=7, final_logit_softcapping=None, norm_topk_prob=False, eos_token_id=[1, 2])
    config.save_pretrained(tmp_path)
    loaded = load_config(tmp_path)
    assert loaded.to_dict() | {"dtype": None} == config.to_dict() | {"dtype": None}


def write(folder: Path, text: str) -> Path:
    (folder / "config.json").write_text(text)
    return folder


def test_missing_folder_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such folder"):
        load_config(tmp_path / "absent")


def test_missing_config_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no config\.json"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "model_type is 'list', not 'beam'"),
        ('{"model_type": "llama"}', "model_type is 'llama', not 'beam'"),
        ('{"model_type": "beam", "num_expert": 4}', "unknown field num_expert"),
        ('{"model_type": "beam", "rope_theta": 5}', "unknown field rope_theta"),
        ('{"model_type": "beam", "num_experts": "many"}', "num_experts"),
        ('{"model_type": "beam", "attention_bias": true}', "attention_bias = True cannot be used"),
    ],
)
def test_bad_config_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as raised:
        load_config(write(tmp_path, text))
    assert str(tmp_path / "config.json") in str(raised.value)


def test_generation_settings_in_the_config_are_not_unknown(tmp_path: Path) -> None:
    load_config(write(tmp_path, json.dumps({"model_type": "beam", "temperature": 0.7, "torch_dtype": "bfloat16"})))
