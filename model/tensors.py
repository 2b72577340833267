"""The tensors of a Beam checkpoint: names, shapes, and which of them are float32 always; experts' stacks in memory."""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from beam_rl.model.config import BeamConfig

FUSED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<kind>gate_up|down)_proj")
"""Name of one layer's experts in one tensor, as transformers has them in memory."""
CACHED = 2**19
"""Elements that a CPU's cache holds with what is computed from them."""
BUSY = 2**26
"""Elements that keep a GPU busy, and whose float32 copies its memory has room for."""


def hf_tensors(config: BeamConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint, with per-expert names, in the model's order."""
    hidden, vocab, dim = config.hidden_size, config.vocab_size, config.head_dim
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer, kind in enumerate(config.mlp_layer_types or ()):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.gate_bias": (heads,),
            f"{prefix}self_attn.q_proj.weight": (heads * dim, hidden),
            f"{prefix}self_attn.k_proj.weight": (groups * dim, hidden),
            f"{prefix}self_attn.v_proj.weight": (groups * dim, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, heads * dim),
            f"{prefix}self_attn.q_norm.weight": (dim,),
            f"{prefix}self_attn.k_norm.weight": (dim,),
            f"{prefix}self_attn.gate_proj.weight": (heads * dim, hidden),
        }
        if kind == "sparse":
            shapes |= {
                f"{prefix}mlp.gate.weight": (config.num_experts, hidden),
                f"{prefix}mlp.gate.e_score_correction_bias": (config.num_experts,),
            }
            for expert in range(config.num_experts):
                shapes |= _mlp(f"{prefix}mlp.experts.{expert}.", hidden, config.moe_intermediate_size)
        else:
            shapes |= _mlp(f"{prefix}mlp.", hidden, config.intermediate_size)
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{prefix}{norm}_layernorm.weight"] = (hidden,)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def _mlp(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }


def is_float32(name: str) -> bool:
    """Whether a tensor is float32 whatever the checkpoint's dtype: the router's weight and correction bias."""
    return name.endswith((".mlp.gate.weight", ".mlp.gate.e_score_correction_bias"))


def runs(tensor: Tensor) -> Iterator[slice]:
    """Slices of a tensor's first dimension that are computed at once: as much of it as suits the device."""
    width = max(1, tensor.numel() // max(1, len(tensor)))
    step = max(1, (CACHED if tensor.device.type == "cpu" else BUSY) // width)
    return (slice(start, start + step) for start in range(0, len(tensor), step))


def initial_tensors(config: BeamConfig, seed: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """A freshly initialised checkpoint: the same for a seed, whatever layout reads it.

    Matrices are normal with the config's initializer_range, norm weights one, biases zero, as in the reference.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, shape in hf_tensors(config).items():
        if name.endswith("bias"):
            tensor = torch.zeros(shape)
        elif "norm" in name:
            tensor = torch.ones(shape)
        else:
            tensor = torch.randn(shape, generator=generator) * config.initializer_range
        yield name, tensor if is_float32(name) else tensor.to(dtype)
