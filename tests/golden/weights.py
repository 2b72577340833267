"""Weights of the reference models, from their seeds.

`reference.safetensors` and `config.json` in the folders beside this file were written by transformers 5.24.0's own
`BeamForCausalLM` (float32, eager attention, CPU, torch 2.13.0). The weights that it ran with are not stored: they were
drawn from a seeded generator in the order of that model's `named_parameters()` and `named_buffers()`, which this file
repeats. `DIGESTS` makes a generator that draws other numbers fail loudly.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent
SEEDS = {"tiny": 100, "groups": 101, "long": 102}
DIGESTS = {
    "tiny": "de71df5f77ec6ed448b780b282bac4160c10e6bcbb6c19dd4422f506bdb1eae7",
    "groups": "4347b6ce17f598a46a6c01037cc094004c4cfbc542846a5026d51d35b77e4497",
    "long": "bdd64e643c9359f71cef60b04cbdf894e68adf3668e72255c57195e850c0f6e2",
}
"""SHA-256 over names and contents of the per-expert checkpoint, in the order of names."""


def parameter_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The reference model's parameters and then its buffers, in its own order, experts fused."""
    hidden, vocab, dim = config["hidden_size"], config["vocab_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    experts, width = config["num_experts"], config["moe_intermediate_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer, kind in enumerate(config["mlp_layer_types"]):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        yield f"{attention}gate_bias", (config["num_attention_heads"],)
        for name, rows in (("q", heads), ("k", groups), ("v", groups)):
            yield f"{attention}{name}_proj.weight", (rows, hidden)
        yield f"{attention}o_proj.weight", (hidden, heads)
        yield f"{attention}q_norm.weight", (dim,)
        yield f"{attention}k_norm.weight", (dim,)
        yield f"{attention}gate_proj.weight", (heads, hidden)
        if kind == "sparse":
            yield f"{mlp}experts.gate_up_proj", (experts, 2 * width, hidden)
            yield f"{mlp}experts.down_proj", (experts, hidden, width)
            yield f"{mlp}gate.weight", (experts, hidden)
        else:
            yield f"{mlp}gate_proj.weight", (config["intermediate_size"], hidden)
            yield f"{mlp}up_proj.weight", (config["intermediate_size"], hidden)
            yield f"{mlp}down_proj.weight", (hidden, config["intermediate_size"])
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"model.layers.{layer}.{norm}_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)
    for layer, kind in enumerate(config["mlp_layer_types"]):
        if kind == "sparse":
            yield f"model.layers.{layer}.mlp.gate.e_score_correction_bias", (experts,)


def fused_weights(name: str) -> dict[str, torch.Tensor]:
    """Weights of a reference model, float32, experts fused; no norm, bias or router is trivial."""
    generator = torch.Generator().manual_seed(SEEDS[name])
    weights = {}
    for tensor, shape in parameter_shapes(json.loads((FOLDER / name / "config.json").read_text())):
        noise = torch.randn(shape, generator=generator)
        if tensor.endswith("e_score_correction_bias"):
            weights[tensor] = noise * 0.1
        elif tensor.endswith("gate_bias"):
            weights[tensor] = noise * 0.5
        elif tensor.endswith("mlp.gate.weight"):
            weights[tensor] = noise * 0.3
        elif "norm" in tensor:
            weights[tensor] = 1 + noise * 0.1
        else:
            weights[tensor] = noise * (0.6 / math.sqrt(shape[-1]))
    return weights


def weights(name: str) -> dict[str, torch.Tensor]:
    """Weights of a reference model as a checkpoint names them: one tensor an expert and projection."""
    split = {}
    for tensor, value in fused_weights(name).items():
        if tensor.endswith("experts.gate_up_proj"):
            prefix = tensor.removesuffix("gate_up_proj")
            for expert, matrices in enumerate(value):
                gate, up = matrices.chunk(2)
                split[f"{prefix}{expert}.gate_proj.weight"] = gate.contiguous()
                split[f"{prefix}{expert}.up_proj.weight"] = up.contiguous()
        elif tensor.endswith("experts.down_proj"):
            prefix = tensor.removesuffix("down_proj")
            split |= {f"{prefix}{e}.down_proj.weight": matrix.contiguous() for e, matrix in enumerate(value)}
        else:
            split[tensor] = value
    return split


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names and contents."""
    state = hashlib.sha256()
    for name in sorted(tensors):
        state.update(name.encode())
        state.update(tensors[name].numpy().tobytes())
    return state.hexdigest()


def write(name: str, folder: Path) -> Path:
    """Write a reference model's checkpoint, with its reference values beside it, into a new folder.

    Raises:
        RuntimeError: this machine's generator draws other numbers than the reference's did.
    """
    tensors = weights(name)
    if digest(tensors) != DIGESTS[name]:
        raise RuntimeError(f"the weights of {name} differ from the reference's: torch.randn draws other numbers here")
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in ("config.json", "reference.safetensors"):
        shutil.copyfile(FOLDER / name / file, folder / file)
    return folder
