"""Norms that are computed twice: nothing may change but the memory."""

import gc

import torch
from torch import Tensor

from beam_rl.model import fused
from beam_rl.model.forget import forget_norm

EPS = 1e-5


def chain(inputs: list[Tensor], *, forget: bool) -> tuple[Tensor, Tensor]:
    """The norm of x, and what is computed from it."""
    x, weight, matrix = inputs
    normed = fused.rms_norm(x, weight, EPS)
    branch = (normed @ matrix).tanh() @ matrix
    if forget:
        forget_norm(normed, x, weight, EPS, branch)
    return normed, branch


def test_a_forgotten_norm_takes_no_memory_and_gives_the_same_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in ((7, 16), (16,), (16, 16))
    ]
    kept, expected = chain(inputs, forget=False)
    normed, branch = chain(inputs, forget=True)
    assert normed.untyped_storage().nbytes() == 0
    grads = torch.autograd.grad(branch.square().sum(), inputs)
    assert torch.equal(normed, kept)
    for grad, other in zip(grads, torch.autograd.grad(expected.square().sum(), inputs), strict=True):
        assert torch.equal(grad, other)


def test_without_a_backward_pass_nothing_is_forgotten() -> None:
    with torch.no_grad():
        normed, _ = chain([torch.ones(3, 4), torch.ones(4), torch.ones(4, 4)], forget=True)
    assert normed.untyped_storage().nbytes() > 0


def alive_after_backward(*, forget: bool) -> int:
    """Tensors of the norm's shape, while the graph is still there."""
    inputs = [torch.randn(shape).requires_grad_() for shape in ((37, 16), (16,), (16, 16))]
    _, branch = chain(inputs, forget=forget)
    branch.sum().backward()
    gc.collect()
    return sum(isinstance(each, Tensor) and each.shape == branch.shape for each in gc.get_objects())


def test_hooks_of_a_graph_keep_no_norm_that_was_computed_again() -> None:
    assert alive_after_backward(forget=True) == alive_after_backward(forget=False)
