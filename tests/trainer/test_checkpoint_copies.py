"""What a save takes from training: one copy of everything in host memory, which is then used again."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from beam_rl.trainer.checkpoint_optimizer import boxes
from beam_rl.trainer.engine import Sequence, TrainerEngine
from beam_rl.trainer.optimizer import tensors

SAMPLES = [Sequence(torch.arange(3, 20), torch.ones(16)), Sequence(torch.arange(40, 50), torch.ones(9))]


def train(engine: TrainerEngine) -> str:
    """Loss of one step, exactly."""
    found = engine.forward_backward(SAMPLES, lambda logprobs, *_: (-logprobs.sum() / 100, {}), replay=False)["loss"]
    engine.optimizer_step()
    return found.hex()


class Written(TorchDispatchMode):
    """Bytes that operations write: results in memory that no argument lies in, and arguments that are written over."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {tensor.untyped_storage()._cdata for tensor in self.plain((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for tensor in self.plain(result):
            if function._schema.name.endswith("_") or tensor.untyped_storage()._cdata not in before:
                self.count += tensor.nbytes
        return result

    @staticmethod
    def plain(values: Any) -> list[torch.Tensor]:
        """Tensors among the values, without Megatron's wrappers, which hold no memory."""
        return [value for value in tree_iter(values) if type(value) in (torch.Tensor, torch.nn.Parameter)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_waits_while_a_state_is_copied_many_times(dtype: Any, engine_for: Callable, tmp_path: Path) -> None:
    """Megatron's gather writes every byte of the optimizer's six times on the host; a copy of everything writes one."""
    engine = engine_for(dtype=dtype)
    state = (*engine.models[0].parameters(), *tensors(engine.optimizer))
    with Written() as written:
        engine.save(tmp_path / "step_1", {}, asynchronous=True)
    assert written.count / sum(tensor.nbytes for tensor in state) < 1.1


def test_every_save_faults_in_memory_of_its_own(engine_for: Callable, tmp_path: Path) -> None:
    """It is kept for the next save, which does not touch what is still being written, and goes with the engine."""
    engine = engine_for(dtype="bfloat16")
    engine.save(tmp_path / "step_1", {}, asynchronous=True)
    memory = weakref.ref(engine.host_memory._bytes)
    train(engine)
    engine.save(tmp_path / "step_2", {}, asynchronous=True)
    assert engine.host_memory._bytes is memory()
    expected = train(engine)
    engine.load(tmp_path / "step_1")
    train(engine)
    assert train(engine) == expected
    del engine
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 5), (2, 2, 3, 2)])
def test_a_ranks_range_of_a_tensor_is_saved_in_another_place_or_twice(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel() + 1):
        for end in range(start, whole.numel() + 1):
            found = list(boxes(shape, start, end))
            parts = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].flatten() for box in found]
            assert [int(value) for part in parts for value in part] == list(range(start, end))
            assert len(found) < 2 * len(shape)
