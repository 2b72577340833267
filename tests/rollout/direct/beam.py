"""A small Beam as the checks want it: its checkpoint, its parameters in vLLM's layout, and an engine around them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from beam_rl.model.checkpoint import HFCheckpoint, save_hf
from beam_rl.model.config import BeamConfig
from beam_rl.model.tensors import hf_tensors

VOCABULARY, HIDDEN, EXPERTS, WIDTH, PADDED = 20, 64, 4, 32, 64
CONFIG = BeamConfig(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=96,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    sliding_window=8,
    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    mlp_layer_types=["dense", "sparse", "sparse", "sparse", "sparse"],
    moe_intermediate_size=WIDTH,
    num_experts=EXPERTS,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    architectures=["BeamForCausalLM"],
    dtype="bfloat16",
)


def weights(seed: int = 0) -> dict[str, Tensor]:
    """A checkpoint's tensors, all different."""
    generator = torch.Generator().manual_seed(seed)
    router = (".mlp.gate.weight", ".e_score_correction_bias")
    return {
        name: torch.randn(shape, generator=generator).to(torch.float32 if name.endswith(router) else torch.bfloat16)
        for name, shape in hf_tensors(CONFIG).items()
    }


def saved(folder: Path) -> HFCheckpoint:
    """The checkpoint, written into a folder."""
    save_hf(folder / "model", CONFIG, weights().items())
    return HFCheckpoint(folder / "model")


def native(tensors: dict[str, Tensor], *, merged: bool = True) -> dict[str, Tensor]:
    """Parameters as vLLM's loaders fill them, put together here by what its model's forward pass reads."""
    parameters = dict(tensors)

    def join(name: str, *parts: str) -> None:
        parameters[name] = torch.cat([parameters.pop(part) for part in parts])

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        parameters[name] = torch.cat([parameters[name], parameters[name].new_zeros(PADDED - VOCABULARY, HIDDEN)])
    for index, kind in enumerate(CONFIG.mlp_layer_types or ()):
        block, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
        qkv = [f"{block}{part}_proj.weight" for part in ("q", "k", "v")]
        if merged:
            join(f"{block}qkv_gate_proj.weight", *qkv, f"{block}gate_proj.weight")
        else:
            join(f"{block}qkv_proj.weight", *qkv)
            join(f"{block}output_gate_proj.weight", f"{block}gate_proj.weight")
        if kind == "dense":
            join(f"{mlp}gate_up_proj.weight", f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight")
            continue
        names = [[f"{mlp}experts.{e}.{part}_proj.weight" for part in ("gate", "up", "down")] for e in range(EXPERTS)]
        apart = [[parameters.pop(name) for name in expert] for expert in names]
        routed = f"{mlp}experts.routed_experts."
        parameters[f"{routed}w13_weight"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in apart])
        parameters[f"{routed}w2_weight"] = torch.stack([down for *_, down in apart])
    return parameters


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint with every layer's experts in two tensors."""
    joined = native(tensors)
    experts = {name: tensor for name, tensor in joined.items() if ".routed_experts." in name}
    names = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
    others = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name, tensor in experts.items():
        prefix, parameter = name.split("routed_experts.")
        others[prefix + names[parameter]] = tensor
    return others


def blank(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Memory that was taken away and given back: it holds anything."""
    return {name: torch.full_like(tensor, 7) for name, tensor in parameters.items()}


def engine(backend: str = "TRITON", quant_config: Any = None, **parallel: Any) -> tuple[Any, nn.Module]:
    """vLLM's configuration and model, as far as `check_engine` reads them."""
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    settings = SimpleNamespace(**(sizes | {"enable_expert_parallel": False} | parallel))
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.w13_weight = nn.Parameter(torch.zeros(1))
    model.experts.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=backend))  # type: ignore[assignment]
    return SimpleNamespace(parallel_config=settings, quant_config=quant_config), model
