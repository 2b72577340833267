"""Device memory that is lent to somebody else for a while: the rollout, which shares the trainer's GPU.

Megatron's own `offload_to_cpu` gives the optimizer tensors of their own when they return. A float32 parameter and its
main parameter are one memory, so the router would from then on be trained in a copy that nobody reads. Here memory is
freed and allocated again below the tensors: whatever was a view of it is one afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor


class Parking:
    """Memory of a set of tensors, on the device or on the host.

    Args:
        frozen: the contents do not change, but for `forget`, so that they are copied to the host once.
    """

    def __init__(self, *, frozen: bool = False) -> None:
        self._copies: dict[torch.UntypedStorage, Tensor] | None = {} if frozen else None
        """Contents of all storages that were ever parked, if they are frozen."""
        self._host: dict[torch.UntypedStorage, Tensor] = {}
        """Contents of the storages whose memory is free; pinned, where the device is a GPU."""
        self._spare: dict[int, list[Tensor]] = {}
        """Host buffers by size, kept because pinning memory is slow."""

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors' memory to the host and free it; until `unpark` they must not be touched."""
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        storages.pop(0, None)  # parked already, or empty
        for storage in storages.values():
            if self._copies is not None and storage in self._copies:
                self._host[storage] = self._copies[storage]
                continue
            size = storage.nbytes()
            spare = self._spare.get(size)
            pin = storage.device.type == "cuda"
            host = spare.pop() if spare else torch.empty(size, dtype=torch.uint8, pin_memory=pin)
            host.copy_(_bytes(storage), non_blocking=True)
            self._host[storage] = host
        synchronize()
        for storage in storages.values():
            storage.resize_(0)

    def unpark(self) -> None:
        """Allocate the memory again, with its contents."""
        for storage, host in self._host.items():
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
        synchronize()
        if self._copies is not None:
            self._copies |= self._host
        else:
            for host in self._host.values():
                self._spare.setdefault(host.numel(), []).append(host)
        self._host.clear()

    def forget(self) -> None:
        """Copy frozen contents anew next time."""
        if self._copies is not None:
            self._copies.clear()


class TrainingMemory:
    """What training holds on a device, in the two parts that leave and return by themselves.

    Whoever changes weights that need no gradient, as LoRA's base, says so (`changed`).
    """

    def __init__(self) -> None:
        self._model, self._frozen, self._optimizer = Parking(), Parking(frozen=True), Parking()

    def changed(self) -> None:
        """Frozen weights are others now."""
        self._frozen.forget()

    def lend(self, chunks: Seq[Any], states: Iterable[Tensor], *, model: bool) -> None:
        """Park the optimizer's states, and if `model` the chunks' parameters; gradient buffers are freed."""
        weights = [tensor for chunk in chunks for tensor in chunk.parameters()]
        ours = {tensor.untyped_storage().data_ptr() for tensor in weights}  # a float32 parameter is its own main
        self._optimizer.park(state for state in states if state.untyped_storage().data_ptr() not in ours)
        if model:
            for chunk in _with_gradients(chunks):
                chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
            self._model.park(weight for weight in weights if weight.requires_grad)
            self._frozen.park(weight for weight in weights if not weight.requires_grad)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def take_back(self, chunks: Seq[Any], *, model: bool, optimizer: bool) -> None:
        """Undo `lend`; gradient buffers that were freed come back as zeros."""
        if model:
            self._model.unpark()
            self._frozen.unpark()
            for chunk in _with_gradients(chunks):
                chunk.restore_grad_buffers(synchronize=False)
        if optimizer:
            self._optimizer.unpark()


def _with_gradients(chunks: Seq[Any]) -> list[Any]:
    """The chunks that Megatron has wrapped for training."""
    return [chunk for chunk in chunks if hasattr(chunk, "offload_grad_buffers")]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """The storage's memory as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def synchronize() -> None:
    """Wait until copies are done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
