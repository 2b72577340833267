"""The distributed optimizer's state in a checkpoint: each rank saves what it holds, from where it lies.

The format is Megatron's `fully_reshardable`: every state has its parameter's shape, so that any layout can load it.
Megatron gathers it on the first data-parallel rank, and writes every byte about six times in host memory on the way.
Nothing has to be gathered: a rank's range of a parameter is a few boxes of it, and the files may hold a tensor in any
boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

Shape = tuple[int, ...]


def sharded_state(optimizer: ChainedOptimizer, models: Mapping[str, Any]) -> dict[Any, Any]:
    """What `ChainedOptimizer.sharded_state_dict` saves, as views of the optimizer's own tensors.

    Args:
        models: the sharded states of the model's parts, which hold the parameters themselves.
    """
    whole = {part.data: part for part in nested_values(extract_sharded_tensors_and_factories(models)[0])}
    states = [_part(part, whole) for part in optimizer.chained_optimizers]
    return dict(enumerate(states)) if len(states) > 1 else states[0]


def _part(part: DistributedOptimizer, whole: Mapping[Tensor, Any]) -> dict[str, Any]:
    """Settings and states of the optimizer of dense or of expert parameters."""
    pieces = [piece for parameter in part.model_param_group_index_map for piece in _pieces(part, parameter, whole)]
    return part.state_dict() | {
        "param_state": dict(enumerate(pieces)),
        "param_state_sharding_type": "fully_reshardable",
    }


def _pieces(part: DistributedOptimizer, parameter: Tensor, whole: Mapping[Tensor, Any]) -> Iterator[ShardedTensor]:
    """This rank's range of a parameter's main parameter and moments, which are flat, in boxes of the parameter."""
    held = part._get_model_param_range_map(parameter)["param"]
    states = part._get_main_param_and_optimizer_states(parameter)
    sharded = whole[parameter]
    for shard in nested_values([sharded.build() if isinstance(sharded, ShardedTensorFactory) else sharded]):
        assert shard.data.is_contiguous(), shard
        begin = shard.data.storage_offset() - parameter.storage_offset()  # a factory may cut the parameter
        start, end = max(held.start, begin), min(held.end, begin + shard.data.numel())
        filled = list(boxes(shard.local_shape, start - begin, end - begin))
        assert sum(math.prod(shape) for _, shape in filled) == max(end - start, 0), (shard, filled)
        for offset, shape in filled:
            here = slice(start - held.start, start - held.start + math.prod(shape))
            start += math.prod(shape)
            for name in ("param", *part.optimizer_state_keys):
                data = states[name].detach()[here].view(shape)
                yield replace(
                    shard,
                    key=f"optimizer.state.{name}.{shard.key}",
                    data=data,
                    dtype=data.dtype,
                    local_shape=shape,
                    global_offset=tuple(a + b for a, b in zip(shard.global_offset, offset, strict=True)),
                    axis_fragmentations=None,  # no regular grid: Megatron does not check that all of it is there
                    replica_id=(*shard.replica_id[:2], 0),  # (pp, tp, dp): no two dp ranks hold the same
                )


def boxes(shape: Shape, start: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Offsets and shapes of the boxes that elements `start` to `end` of a contiguous tensor fill, in their order.

    They are its whole rows, and boxes of the row before and of the row after.
    """
    row = math.prod(shape[1:])
    first = min(-(-start // row) * row, end)
    last = max(end // row * row, first)
    for low, high in ((start, first), (first, last), (last, end)):
        if low >= high:
            continue
        number = low // row
        if low % row == 0 and high % row == 0:
            yield (number, *(0 for _ in shape[1:])), ((high - low) // row, *shape[1:])
        else:
            for offset, size in boxes(shape[1:], low - number * row, high - number * row):
                yield (number, *offset), (1, *size)
