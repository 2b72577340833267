"""Beam's tensor-parallel linears: Megatron's, and the two things that a precision may change about them.

Under LoRA a layer has an `adapter`, which multiplies with the merged weight in place of the frozen one; under MXFP8
the product is another (`mxfp8.linear`). Both stand between the same communication.
"""

from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from beam_rl.model import mxfp8
from beam_rl.model.lora_layers import ColumnAdapter, RowAdapter
from beam_rl.model.mxfp8_config import Mxfp8Settings
from beam_rl.model.transformer_config import BeamTransformerConfig


def _plain(linear: "BeamColumnParallelLinear | BeamRowParallelLinear") -> bool:
    """Whether the weight is here whole, and as it is multiplied: there is nothing of Megatron's to do."""
    return linear.adapter is None and linear.mxfp8 is None and linear.tp_group.size() == 1


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [tokens, 1, in] by weight, as rows: of three axes PyTorch takes another path where nothing has a gradient."""
    return F.linear(x.squeeze(1), weight).unsqueeze(1)  # of `x[:, 0]` the gradient would be a copy


class BeamColumnParallelLinear(ColumnParallelLinear):
    """Output features split over tensor-parallel ranks."""

    config: BeamTransformerConfig
    adapter: ColumnAdapter | None
    """LoRA's, on this rank; None without LoRA."""
    mxfp8: Mxfp8Settings | None = None
    """How the product is quantised; None where it is not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapter = None  # here, because a class attribute would hide the module that replaces it

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """Output [tokens, 1, out / tp] of input [tokens (/ tp if sequence parallel), 1, in]; no bias."""
        if _plain(self):
            return _product(input_, self.weight), None
        output, _ = super().forward(input_)
        return (output if self.adapter is None else self.adapter.join(output, input_)), None

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        *args: Any,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Megatron's product with its communication, or another with the same communication."""
        merges = self.adapter is not None and not self.adapter.dropping
        if self.mxfp8 is None and not merges:
            communication = {
                "allreduce_dgrad": allreduce_dgrad,
                "sequence_parallel": sequence_parallel,
                "tp_group": tp_group,
            }
            return super()._forward_impl(input, weight, *args, **communication, **kwargs)
        if sequence_parallel:  # backward: the sum of the ranks' gradients, scattered
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        if self.adapter is not None:
            return self.adapter.product(input, weight)
        assert self.mxfp8 is not None
        return mxfp8.linear(input, weight, self.mxfp8)


class BeamRowParallelLinear(RowParallelLinear):
    """Input features split over tensor-parallel ranks."""

    config: BeamTransformerConfig
    adapter: RowAdapter | None
    """LoRA's, on this rank; None without LoRA."""
    mxfp8: Mxfp8Settings | None = None
    """How the product is quantised; None where it is not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapter = None  # here, because a class attribute would hide the module that replaces it

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """Output [tokens (/ tp if sequence parallel), 1, out] of input [tokens, 1, in / tp]; no bias."""
        if _plain(self):
            return _product(input_, self.weight), None
        output, _ = super().forward(input_)
        return (output if self.adapter is None else self.adapter.join(output, input_)), None

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Megatron's product, or another; what communication there is comes after."""
        if self.adapter is not None and not self.adapter.dropping:
            return self.adapter.product(input, weight)
        if self.mxfp8 is None:
            return super()._forward_impl(input, weight, *args, **kwargs)
        return mxfp8.linear(input, weight, self.mxfp8)
