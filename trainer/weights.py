"""The trainer's current weights as vLLM's weight-transfer engines read them."""

from collections.abc import Iterator

from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from beam_rl.trainer.engine import TrainerEngine


class EngineWeights(WeightSource):
    """All weights as the rollout wants them, walked through anew for every transfer, on every rank."""

    def __init__(self, engine: TrainerEngine) -> None:
        self.engine = engine
        self._metadata: list[ParamMeta] | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.engine.rollout_weights())

    def metadata(self) -> list[ParamMeta]:
        """Name, type and shape of each; the first call exports once, so that the two cannot disagree."""
        if self._metadata is None:
            self._metadata = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]
        return self._metadata
