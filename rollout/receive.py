"""Weight transfer through a file in shared memory: the engine's half, which runs inside vLLM's workers.

Under MXFP8 the file holds the quantised weights as E4M3 data and E8M0 scales, about half of bfloat16's bytes. They are
dequantised here, exactly, and vLLM loads them as it would a checkpoint's.

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

from beam_rl.model import mxfp8
from beam_rl.model.config import BeamConfig
from beam_rl.model.mxfp8_config import BLOCK, Mxfp8Settings
from beam_rl.model.tensors import hf_tensors
from beam_rl.rollout.mxfp8 import settings_of

PLAIN = ("BF16", "F32")
"""Types, by safetensors' names, of tensors that are not quantised."""


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
            ValueError: tensors are missing, unknown, or of another shape or type; names them. The model is untouched.
        """
        with safe_open(update_info.path, "pt") as file:
            _check(file, expected_tensors(cast(BeamConfig, self.model_config.hf_config), settings_of(self.vllm_config)))
            if self.device.type == "cpu":
                drop_expert_kernels(self.model)
            with torch.device(self.device):
                initialize_layerwise_reload(self.model)
                load: Any = self.model.load_weights
                loaded: set[str] = load(_tensors(file, cast(torch.dtype, self.model_config.dtype)))
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


Expected = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]
"""Shape and possible types of tensors, by name."""


def expected_tensors(config: BeamConfig, settings: Mxfp8Settings | None) -> Expected:
    """Shape and possible types, by safetensors' names, of every tensor that a transfer brings."""
    expected: Expected = {}
    for name, shape in hf_tensors(config).items():
        if settings is not None and settings.covers(name):
            expected[name] = (tuple(shape), ("F8_E4M3",))
            expected[name + mxfp8.SCALE_SUFFIX] = ((*shape[:-1], -(-shape[-1] // BLOCK)), ("F8_E8M0",))
        else:
            expected[name] = (tuple(shape), PLAIN)
    return expected


def _check(file: Any, expected: Expected) -> None:
    names = set(file.keys())
    known = {name: file.get_slice(name) for name in names & expected.keys()}
    faults = {
        "missing": expected.keys() - names,
        "unknown": names - expected.keys(),
        "wrongly shaped": {name for name, found in known.items() if tuple(found.get_shape()) != expected[name][0]},
        "of another type": {name for name, found in known.items() if found.get_dtype() not in expected[name][1]},
    }
    found = [f"{kind}: {_listed(which)}" for kind, which in faults.items() if which]
    if found:
        raise ValueError(f"weight update refused; {'; '.join(found)}")


def _listed(names: set[str], most: int = 5) -> str:
    shown = ", ".join(sorted(names)[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _tensors(file: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    names = set(file.keys())
    for name in sorted(names):
        scale = name + mxfp8.SCALE_SUFFIX
        if scale in names:
            yield name, mxfp8.dequantize(file.get_tensor(name), file.get_tensor(scale), dtype)
        elif not name.endswith(mxfp8.SCALE_SUFFIX):
            yield name, file.get_tensor(name)
