"""Weight transfer through a file in shared memory: the engine's half, which runs inside vLLM's workers.

Two faults of vLLM 0.32 are mended here. On the CPU a second load leaves expert weights unpacked while the kernel reads
them as packed, unless the kernel is dropped first. And a failed update leaves the model's parameters without data:
so the file is checked before the model is touched, and refusing it leaves the engine as it was.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from beam_rl.model.config import BeamConfig
from beam_rl.model.tensors import hf_tensors


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """The file names itself at every update: there is nothing to agree on beforehand."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One full set of weights."""

    path: str
    """Safetensors file, readable by every worker, with all weights under their Hugging Face names."""


class ShmReceiver(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Loads a full set of weights from a shared file."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        """The model is prepared in `receive_weights`, once the weights are known to be right."""

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Check the file, then load all of it.

        Raises:
            ValueError: tensors are missing, unknown or of another shape; names them. The model is untouched.
        """
        with safe_open(update_info.path, "pt") as file:
            _check(file, hf_tensors(cast(BeamConfig, self.model_config.hf_config)))
            if self.device.type == "cpu":
                drop_expert_kernels(self.model)
            with torch.device(self.device):
                initialize_layerwise_reload(self.model)
                load: Any = self.model.load_weights
                loaded: set[str] = load(_tensors(file))
                finalize_layerwise_reload(self.model, self.model_config)
        left_out = {name for name, _ in self.model.named_parameters()} - loaded
        if left_out:
            raise RuntimeError(f"the model kept old values of {_listed(left_out)} after a weight update")

    def finish_weight_update(self) -> None:
        """Everything was done in `receive_weights`."""

    def shutdown(self) -> None:
        pass


def drop_expert_kernels(model: nn.Module) -> None:
    """Make vLLM build its CPU expert kernels anew from the weights about to be loaded."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def _check(file: Any, expected: dict[str, tuple[int, ...]]) -> None:
    names = set(file.keys())
    wrong = {n for n in names & expected.keys() if tuple(file.get_slice(n).get_shape()) != tuple(expected[n])}
    faults = {"missing": expected.keys() - names, "unknown": names - expected.keys(), "wrongly shaped": wrong}
    found = [f"{kind}: {_listed(which)}" for kind, which in faults.items() if which]
    if found:
        raise ValueError(f"weight update refused; {'; '.join(found)}")


def _listed(names: set[str], most: int = 5) -> str:
    shown = ", ".join(sorted(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _tensors(file: Any) -> Iterator[tuple[str, Tensor]]:
    for name in file.keys():  # noqa: SIM118  (not a dict)
        yield name, file.get_tensor(name)
