"""The gradient of one optimizer step, in Megatron's buffers, without its passes over memory that compute nothing.

Megatron clears its buffers before a step and adds every gradient to them. Here a parameter's first gradient of a step
is copied over what the last step left, so that nothing is read or cleared first; only what got no gradient at all is
cleared, before the buffers are reduced over data-parallel ranks. Gradients of norms, biases and the like wait, and are
copied together: there are hundreds of them, and a copy takes longer to launch than to run.
"""
# ruff: noqa: E402 (Megatron is imported after the CPU module had its say)

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from beam_rl.trainer import cpu

cpu.install()

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

if torch.cuda.is_available() or TYPE_CHECKING:
    from beam_rl.model.kernels import gradients as kernels

SMALL, LARGE = 2**16, 2**20
"""Elements up to which a gradient waits for others, and from which on a kernel of our own pays: PyTorch's mixed-dtype
ones are slow, but launched sooner."""


class GradientBuffers(DistributedDataParallel):
    """Megatron's wrapper of a model whose `zero_grad_buffer` costs nothing.

    Between `zero_grad_buffer` and `settle`, which `finish_grad_sync` calls, `main_grad` is undefined.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: set[Tensor] = set()
        """Parameters whose `main_grad` belongs to the step at hand."""
        self._waiting: dict[Tensor, tuple[Tensor, Tensor, bool]] = {}
        """By parameter: its `main_grad`, a small gradient that is to be added to it, and whether it is the first."""
        self._first: Tensor | None = None
        """While a CUDA graph is captured: where it finds, when it runs, whether its gradients are the first."""
        for param in self.params_with_grad:
            param.claim_main_grad = partial(self._claim, param)

    def _claim(self, param: Any) -> tuple[Tensor, bool | Tensor]:
        """`main_grad` of a parameter, to which the caller now adds a gradient, and whether to overwrite what is there.

        An autograd function may ask for it itself (`claim_main_grad`), if the gradient is so large that a copy counts;
        to autograd it then returns None.
        """
        if self._first is not None:
            return param.main_grad, self._first
        if param in self._waiting:
            self._add_waiting()
        first = param not in self._held
        self._held.add(param)
        return param.main_grad, first

    def claim_all(self, params: Seq[Any]) -> bool:
        """Whether a CUDA graph that now adds a gradient of each of the parameters overwrites what is there.

        Where that is so for some alone, what is there is cleared, and the graph adds to all.
        """
        if not self._waiting.keys().isdisjoint(params):
            self._add_waiting()
        late = [param for param in params if param not in self._held]
        self._held.update(late)
        first = len(late) == len(params)
        if not first:
            for param in late:
                param.main_grad.zero_()
        return first

    @contextmanager
    def captured(self, first: Tensor) -> Iterator[None]:
        """While a CUDA graph is captured.

        Args:
            first: int32 [1]. It tells the graph, whenever it runs, whether to overwrite what is there (1) or not (0);
                `claim_all` knows.
        """
        self._first = first
        try:
            yield
        finally:
            self._first = None

    def add(self, param: Any, grad: Tensor) -> None:
        """Add a gradient to its parameter's sum."""
        main_grad, first = self._claim(param)
        accumulate_(main_grad, grad, first=first)

    def _make_backward_post_hook(self, param: Any) -> Callable[..., None]:
        """Megatron's, for this module's use of it: gradients are reduced when all micro batches are through."""

        def hook(*_: Any) -> None:
            grad, param.grad = param.grad, None
            if grad is None:
                return
            if grad.numel() > SMALL:
                self.add(param, grad)
            else:
                main_grad, first = self._claim(param)
                self._waiting[param] = main_grad, grad, bool(first)

        return hook

    def _add_waiting(self) -> None:
        """Add the gradients that wait, in one call for those of a dtype that come first, and one for the others."""
        alike: dict[tuple[bool, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for main_grad, grad, first in self._waiting.values():
            alike.setdefault((first, grad.dtype), []).append((main_grad, grad))
        self._waiting.clear()
        for (first, _), pairs in alike.items():
            main_grads, grads = map(list, zip(*pairs, strict=True))
            if first:
                torch._foreach_copy_(main_grads, grads)
            else:
                torch._foreach_add_(main_grads, grads)

    def zero_grad_buffer(self) -> None:
        """Forget all gradients."""
        self._held.clear()
        self._waiting.clear()
        for group in self.bucket_groups + self.expert_parallel_bucket_groups:
            group.reset()

    def settle(self) -> None:
        """Complete all gradients; of a parameter that got none in this step it becomes 0."""
        self._add_waiting()
        for param in self.params_with_grad:
            if param not in self._held:
                param.main_grad.zero_()
                self._held.add(param)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Reduce the gradients over the data-parallel ranks."""
        self.settle()
        super().finish_grad_sync(force_all_reduce)


def accumulate_(total: Tensor, grad: Tensor, *, first: bool | Tensor) -> None:
    """total += grad, or total = grad if it is the first; total is contiguous, of grad's shape, in any precision."""
    large = total.dtype != grad.dtype and grad.numel() >= LARGE and grad.is_contiguous()
    if grad.is_cuda and (large or isinstance(first, Tensor)):
        kernels.accumulate_(total, grad.contiguous(), first=first)
    elif first:
        total.copy_(grad)
    else:
        total.add_(grad)


def data_parallel(transformer: Any, model: Any) -> GradientBuffers:
    """The model, of Megatron's configuration `transformer`, with float32 gradients for the distributed optimizer."""
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    layout = DistributedOptimizer.compute_full_param_layout(
        [param for param in model.parameters() if param.requires_grad],
        None,
        replicas.size(),
        config,
        expert_data_parallel_world_size=parallel_state.get_expert_data_parallel_group().size(),
    )
    return GradientBuffers(transformer, config, model, full_param_layout=layout)
