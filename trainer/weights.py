"""The trainer's current weights as vLLM's weight-transfer engines read them."""

from collections.abc import Iterator
from functools import cached_property

from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from beam_rl.trainer.engine import TrainerEngine


class EngineWeights(WeightSource):
    """All weights as the rollout wants them, walked through anew for every transfer, on every rank.

    In the shape that vLLM 0.33 asks for; the CPU stack's 0.32 has another, and there nothing reads this class.
    """

    def __init__(self, engine: TrainerEngine, *, fused_experts: bool = False) -> None:
        """`fused_experts`: see `TrainerEngine.rollout_weights`; only for this project's receivers."""
        self.engine = engine
        self.fused_experts = fused_experts

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of each; every rank owns all of them."""
        return iter(self.engine.rollout_weights(fused_experts=self.fused_experts))

    __iter__ = iter_full

    @cached_property
    def metadata(self) -> list[ParamMeta]:  # type: ignore[override]
        """Name, type and shape of each. Needs no weights, which may be on the host when it is first asked for."""
        described = self.engine.rollout_description(fused_experts=self.fused_experts)
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in described]
