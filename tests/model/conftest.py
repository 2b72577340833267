"""One process, one Megatron world, for the model's tests."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from beam_rl.trainer import cpu

cpu.install()  # before Megatron is imported

from beam_rl.model.config import BeamConfig  # noqa: E402
from beam_rl.model.gpt import BeamModel, build_model  # noqa: E402
from beam_rl.model.transformer_config import transformer_config  # noqa: E402
from beam_rl.trainer import distributed  # noqa: E402
from beam_rl.trainer.settings import Parallel  # noqa: E402


@pytest.fixture(scope="session")
def build() -> Callable[..., BeamModel]:
    """Builds a whole model in this process."""
    distributed.initialize(Parallel(), seed=0)

    def whole(config: BeamConfig, dtype: torch.dtype = torch.float32, **overrides: Any) -> BeamModel:
        with cpu.cuda_as_cpu():
            megatron = transformer_config(config, params_dtype=dtype, **overrides)
            return build_model(megatron, pre_process=True, post_process=True)

    return whole


@pytest.fixture(scope="session")
def small() -> BeamConfig:
    """A model with every kind of layer, for tests that need no reference."""
    return BeamConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 2,
        mlp_layer_types=["dense", "sparse", "sparse", "dense"],
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        initializer_range=0.2,
    )
