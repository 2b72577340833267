"""How a trainer computes, as one value that travels to its processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from beam_rl.model.lora_config import LoraConfig
from beam_rl.model.mxfp8_config import Mxfp8Settings


@dataclass(frozen=True)
class Precision:
    """Types of weights and activations, and how their products run; the optimizer's main parameters are float32."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Parameters and activations."""
    lora: LoraConfig | None = None
    """Train adapters beside frozen weights; None trains all weights."""
    mxfp8: Mxfp8Settings | None = None
    """Run the projections' GEMMs in MXFP8; None runs them in `dtype`."""
    cuda_graphs: bool | None = None
    """Run the decoder's passes as CUDA graphs; None where it is possible."""
