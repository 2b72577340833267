"""The models that are measured and checked."""

from beam_rl.model.config import BeamConfig
from tests.gpu.measure import SHAPE

SKYRL = "skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap.NewInferenceWorkerWrap"
"""SkyRL's extension of vLLM's workers, which registers the recipe's weight transfer."""


def large() -> BeamConfig:
    """7.2 B parameters, 1.63 B active."""
    return BeamConfig(**SHAPE, architectures=["BeamForCausalLM"], dtype="bfloat16")


def small() -> BeamConfig:
    """A Beam whose vocabulary is so small that an untrained drafter is right now and then."""
    return BeamConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        mlp_layer_types=["dense"] + ["sparse"] * 5,
        moe_intermediate_size=128,
        num_experts=64,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        max_position_embeddings=1024,
        initializer_range=0.1,  # the tokens' probabilities differ by far more than rounding
        architectures=["BeamForCausalLM"],
        dtype="bfloat16",
    )
