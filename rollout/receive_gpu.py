"""Weight transfer over CUDA IPC or NCCL: the engine's half, which runs inside vLLM's workers on GPUs.

SkyRL's transports, whose sending halves stay SkyRL's. What arrives is written straight into the parameters where the
layout of this engine's parameters is known and proved (`direct`); otherwise vLLM's reload takes it, as in SkyRL's
receivers, and the log says why.
"""

from typing import Any, cast

from skyrl.backends.skyrl_train.weight_sync.weight_receivers import (
    _LoadWeightsProxy,
    get_skyrl_ipc_engine,
    get_skyrl_nccl_engine,
)
from torch import nn
from vllm.logger import init_logger

from beam_rl.model.checkpoint import HFCheckpoint
from beam_rl.model.config import BeamConfig
from beam_rl.model.errors import BadInput
from beam_rl.rollout import nccl
from beam_rl.rollout.direct import Layout, Unmapped, Writer, check_engine, difference, layout, per_expert

TRUST_KEY = "beam_trust_layout"
"""Key in vLLM's `additional_config`: True writes directly without proof, for benchmarks with dummy weights."""
logger = init_logger(f"vllm.{__name__}")  # vLLM's workers print what is below its own name


class DirectMixin:
    """Before a SkyRL receiver: updates of the main model go through a `Writer`, if there is one."""

    model: Any

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)  # type: ignore[call-arg]
        self.writer: Writer | None = None
        try:
            self.writer = Writer(proved_layout(vllm_config, model))
        except Unmapped as reason:
            logger.warning("Weight updates go through vLLM's reload, which takes seconds: %s.", reason)
        else:
            logger.info("Weight updates are written directly into %d tensors.", len(self.writer.layout.views))

    def _direct(self) -> Writer | None:
        """The writer, if this update is of the main model's weights (not of a drafter's, nor of an adapter)."""
        main = self.model is self._default_model and not self.skyrl_lora_armed()  # type: ignore[attr-defined]
        return self.writer if main else None

    def start_weight_update(self) -> None:
        if (writer := self._direct()) is not None:
            writer.begin()
        else:
            super().start_weight_update()  # type: ignore[misc]

    def receive_weights(self, update_info: Any) -> None:
        if self.skyrl_lora_armed():  # type: ignore[attr-defined]
            super().receive_weights(update_info)  # type: ignore[misc]
            return
        writer, model = self._direct(), self.model
        self.model = _LoadWeightsProxy(model, _exploded(model) if writer is None else _written(writer))
        try:
            super().receive_weights(update_info)  # type: ignore[misc]
        finally:
            self.model = model

    def finish_weight_update(self) -> None:
        if (writer := self._direct()) is not None:
            self.release()
            writer.finish()
        else:
            super().finish_weight_update()  # type: ignore[misc]

    def release(self) -> None:
        """Give back what the transport holds for the length of an update."""


def _written(writer: Writer) -> Any:
    def load_weights(weights: Any, **_: Any) -> set[str]:
        return writer.load_weights(weights)

    return load_weights


def _exploded(model: nn.Module) -> Any:
    """The model's loader, which gets experts one by one however they came."""

    def load_weights(weights: Any, **named: Any) -> Any:
        return cast(Any, model.load_weights)(weights=per_expert(weights), **named)

    return load_weights


class IPCReceiver(DirectMixin, get_skyrl_ipc_engine()):  # type: ignore[misc]
    """From a trainer on the same GPU."""

    def release(self) -> None:
        """The trainer's buffer, which it can free only then; vLLM's own `finish_weight_update` would do it."""
        self._packed_importer.close()


class NCCLReceiver(DirectMixin, get_skyrl_nccl_engine()):  # type: ignore[misc]
    """From a trainer on other GPUs.

    vLLM 0.33's sender describes the tensors only in the first update, and its receiver remembers the description by the
    model object, which under SkyRL is a new one in every update: the second update would wait for ever.
    """

    _described: Any = None

    def init_transfer_engine(self, init_info: Any) -> None:
        nccl.check()
        self._described = None  # a new trainer describes its tensors anew
        super().init_transfer_engine(init_info)

    def receive_weights(self, update_info: Any) -> None:
        if self.model is not self._default_model:
            super().receive_weights(update_info)
            return
        if update_info.names:
            self._described = update_info
        super().receive_weights(self._described or update_info)
        if hasattr(self, "_last_update_info"):
            self._last_update_info.clear()  # its keys would pile up


def proved_layout(vllm_config: Any, model: nn.Module) -> Layout:
    """The layout of an engine that has just loaded its checkpoint, compared with the files.

    Raises:
        Unmapped: the engine's weights lie otherwise, or there is nothing to compare them with.
    """
    check_engine(vllm_config, model)
    config = cast(BeamConfig, vllm_config.model_config.hf_config)
    found = layout(dict(model.named_parameters()), config)
    additional = vllm_config.additional_config
    if isinstance(additional, dict) and additional.get(TRUST_KEY):
        return found
    if vllm_config.load_config.load_format == "dummy":
        raise Unmapped("the weights are dummies, which prove nothing")
    try:
        name = difference(found, config, HFCheckpoint(vllm_config.model_config.model))
    except BadInput as error:
        raise Unmapped(f"no checkpoint to compare with ({error})") from error
    if name is not None:
        raise Unmapped(f"{name} is not where it is thought to be")
    return found
