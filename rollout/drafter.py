"""A DFlash2 drafter of a Beam: what its checkpoint holds, as vLLM 0.33's `DFlash2BeamForCausalLM` loads it.

A drafter proposes a block of tokens at once, from hidden states that the target's layers `target_layer_ids` (counted
from 0, their outputs) left behind. Embedding and LM head are the target's. Its layers are non-causal sliding-window
attention and a dense SwiGLU, with a short grouped convolution along the block around each; a low-rank selector then
rescores the candidates of every position by the token before it (vllm/models/beam/nvidia/dflash2.py).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from beam_rl.model.config import BeamConfig
from beam_rl.model.errors import BadInput

ARCHITECTURE = "DFlash2BeamDraftModel"
"""By which vLLM knows a drafter of Beam's."""


@dataclass(frozen=True)
class DrafterShape:
    """Sizes that the target does not decide."""

    layers: int = 2
    """At most the target's full-attention layers: vLLM then keeps the drafter's KV in one group, as it has to."""
    window: int = 128
    """Tokens a query sees before its block. Not the target's window: see `layers`."""
    taps: int = 4
    """Positions of the convolution, the own one included."""
    group: int = 32
    """Channels that share a convolution's coefficients."""
    rank: int = 32
    """Rank of the selector."""
    candidates: int = 16
    """Tokens that the selector chooses among at a position."""


def drafter_config(target: BeamConfig, shape: DrafterShape, mask_token: int) -> dict[str, Any]:
    """The drafter's config.json.

    Args:
        mask_token: token id that stands for a position to be filled in; no other use in the target's vocabulary.
    """
    layers = target.num_hidden_layers
    captured = sorted({layers // 4, layers // 2, layers - 2})
    rope = next(rope for rope in (target.rope_parameters or {}).values() if rope is not None)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",  # vLLM has no type of its own for it, and reads these fields
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_parameters": dict(rope),
        "layer_types": ["sliding_attention"] * shape.layers,
        "sliding_window": shape.window,
        "use_sliding_window": True,
        "is_causal": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",  # its kernels take nothing else
        "dflash_config": {
            "target_layer_ids": captured,
            "mask_token_id": mask_token,
            "conv_kernel_size": shape.taps,
            "conv_group_size": shape.group,
            "selector_rank": shape.rank,
            "selector_top_k": shape.candidates,
            "final_logit_softcapping": target.final_logit_softcapping,
        },
    }


def drafter_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a drafter's checkpoint."""
    hidden, width, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    draft = config["dflash_config"]
    taps, rank = draft["conv_kernel_size"], draft["selector_rank"]
    coefficients = 2 * taps * (hidden // draft["conv_group_size"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, hidden * len(draft["target_layer_ids"])),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "candidate_selector.predecessor_codebook": (config["vocab_size"], rank),
        "candidate_selector.successor_codebook": (config["vocab_size"], rank),
        "candidate_selector.hidden_projection.weight": (rank, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (heads, hidden),
            f"{prefix}self_attn.k_proj.weight": (groups, hidden),
            f"{prefix}self_attn.v_proj.weight": (groups, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, heads),
            f"{prefix}self_attn.q_norm.weight": (dim,),
            f"{prefix}self_attn.k_norm.weight": (dim,),
            f"{prefix}mlp.gate_proj.weight": (width, hidden),
            f"{prefix}mlp.up_proj.weight": (width, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, width),
        }
        for convolution in ("attention_conv", "mlp_conv"):
            shapes[f"{prefix}{convolution}.base_kernel"] = (2, taps, hidden)
            shapes[f"{prefix}{convolution}.kernel_projection.weight"] = (coefficients, hidden)
    return shapes


def write_random(folder: Path, target: BeamConfig, shape: DrafterShape, mask_token: int, seed: int) -> Path:
    """An untrained drafter, in bfloat16: it proposes nonsense, which verification must reject."""
    config = drafter_config(target, shape, mask_token)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in drafter_tensors(config).items():
        noise = torch.randn(size, generator=generator)
        if "norm" in name:
            tensor = 1 + 0.1 * noise
        elif name.endswith("base_kernel"):
            tensor = 0.1 * noise
            tensor[:, 0] += 1  # near the identity: the own position
        else:
            tensor = noise / math.sqrt(size[-1])
        tensors[name] = tensor.bfloat16()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def check_drafter(folder: Path, target: BeamConfig) -> None:
    """Raise BadInput unless the folder holds a DFlash2 drafter that fits the target."""
    file = folder / "config.json"
    if not file.is_file():
        raise BadInput(f"drafter {folder}: not a checkpoint folder (it has no config.json).")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{file}: not valid JSON ({error})") from error
    if ARCHITECTURE not in config.get("architectures", []):
        found = config.get("architectures")
        raise BadInput(f"{file}: architectures is {found}; a drafter of Beam's has {ARCHITECTURE}.")
    for name in ("vocab_size", "hidden_size"):
        found, wanted = config.get(name), getattr(target, name)
        if found != wanted:
            raise BadInput(f"{file}: {name} is {found}, the model's is {wanted}: a drafter of another model.")
    captured = config.get("dflash_config", {}).get("target_layer_ids") or []
    if not captured or max(captured) >= target.num_hidden_layers:
        raise BadInput(f"{file}: target_layer_ids is {captured}; the model has {target.num_hidden_layers} layers.")
