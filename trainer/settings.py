"""What a `TrainerEngine` needs to know; every field is checked when it is set, before anything is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from beam_rl.model.errors import BadInput
from beam_rl.model.lora_config import LoraConfig
from beam_rl.model.mxfp8_config import Mxfp8Settings


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise BadInput(f"{name} is {value!r}: {rule}")


@dataclass(frozen=True)
class Parallel:
    """Sizes of the parallel groups; what remains of the world is data parallelism."""

    tp: int = 1
    """Tensor parallelism (with sequence parallelism whenever it is more than one)."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Expert parallelism."""
    cp: int = 1
    """Context parallelism."""
    etp: int = 1
    """Tensor parallelism inside an expert."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "cp", "etp"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "it must be at least 1")


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its learning-rate schedule. A step is one call of `TrainerEngine.optimizer_step`."""

    lr: float = 1e-6
    """Highest learning rate."""
    min_lr: float = 0.0
    """Learning rate at `total_steps`; the constant schedule never reads it."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; vectors (norms, biases) never decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest norm of the whole gradient; 0 turns clipping off."""
    warmup_steps: int = 0
    """Steps of linear warm-up: step k has k / warmup_steps of the learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up."""
    total_steps: int | None = None
    """Steps at which a decaying schedule reaches `min_lr`; required unless constant."""

    def __post_init__(self) -> None:
        _require(self.lr > 0, "lr", self.lr, "it must be positive")
        _require(0 <= self.min_lr <= self.lr, "min_lr", self.min_lr, f"it must lie between 0 and lr ({self.lr})")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "it must not be negative")
        _require(all(0 <= beta < 1 for beta in self.betas), "betas", self.betas, "both must lie in [0, 1)")
        _require(self.eps > 0, "eps", self.eps, "it must be positive")
        _require(self.clip_grad >= 0, "clip_grad", self.clip_grad, "it must be positive, or 0 for no clipping")
        _require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "it must not be negative")
        known = ("constant", "linear", "cosine")
        _require(self.schedule in known, "schedule", self.schedule, f"it must be one of {', '.join(known)}")
        if self.schedule == "constant":
            return
        total = self.total_steps or 0
        _require(total > self.warmup_steps, "total_steps", self.total_steps, "it must exceed warmup_steps")


@dataclass(frozen=True)
class EngineConfig:
    """One trainer process's engine."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Parameters and activations. In bfloat16 the optimizer keeps float32 main parameters."""
    parallel: Parallel = field(default_factory=Parallel)
    optimizer: OptimizerSettings | None = field(default_factory=OptimizerSettings)
    """None builds an engine for forward passes only (a reference model): no gradients, no optimizer state."""
    micro_batch_tokens: int = 16384
    """Packing budget: tokens of a micro batch. One longer sequence is a micro batch of its own."""
    recompute: Literal["full"] | None = None
    """Recompute each layer in the backward pass instead of keeping its activations."""
    cuda_graphs: bool | None = None
    """Run the decoder's passes as CUDA graphs (`graphs`), which keep memory for a micro batch's activations; None does
    wherever it is possible. Micro batches are padded to a multiple of a 16th of the budget (256 tokens at least), so
    that they may exceed it."""
    seed: int = 1
    """Seed of fresh weights and of Megatron's random states."""
    temperature: float = 1.0
    """Softmax temperature of every log-probability: the rollout's, so that both sides score the same policy."""
    lora: LoraConfig | None = None
    """Train adapters beside frozen weights; None trains all weights."""
    mxfp8: Mxfp8Settings | None = None
    """Run the projections in MXFP8; parameters keep their type, and the optimizer its float32 main parameters."""

    def __post_init__(self) -> None:
        _require(self.dtype in ("bfloat16", "float32"), "dtype", self.dtype, "it must be bfloat16 or float32")
        _require(self.micro_batch_tokens > 0, "micro_batch_tokens", self.micro_batch_tokens, "it must be positive")
        _require(self.recompute in (None, "full"), "recompute", self.recompute, "it must be null or full")
        _require(self.temperature > 0, "temperature", self.temperature, "it must be positive")
        rule = "it needs bfloat16, no parallelism but of data, no recompute, no dropout, no MXFP8"
        _require(self.may_have_graphs or not self.cuda_graphs, "cuda_graphs", True, rule)
        both = self.lora is not None and self.mxfp8 is not None
        _require(not both, "mxfp8", "set", "adapters stand beside bfloat16 or float32 weights; leave out lora or mxfp8")

    @property
    def may_have_graphs(self) -> bool:
        """Whether nothing of this excludes CUDA graphs; the model and the machine may."""
        alone = self.parallel == Parallel() and self.recompute is None and self.dtype == "bfloat16"
        return alone and self.mxfp8 is None and not (self.lora and self.lora.lora_dropout)

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32
