"""Norms of the residual, which the forward pass forgets and the backward pass computes again.

They are a third of what a layer would keep, and the cheapest part of it to compute.
"""

from torch import Tensor

from beam_rl.model import fused


def forget_norm(normed: Tensor, x: Tensor, weight: Tensor, eps: float, until: Tensor) -> None:
    """Free the memory of `normed`, the norm of x by weight, until the gradient of `until` is there.

    What keeps `normed` for its backward pass must lie between it and `until`. Where no backward pass will come, nothing
    happens.
    """
    if not until.requires_grad:
        return
    storage = normed.untyped_storage()
    size = storage.nbytes()
    # Writing to `data` is no change that autograd would refuse.
    kept = [(normed.data, x.detach(), weight.detach())]

    def compute_again(_: Tensor) -> None:
        if kept:  # given away: the hook lives as long as the graph, and must not keep them alive
            place, x, weight = kept.pop()
            place.untyped_storage().resize_(size)
            fused.rms_norm_into(place, x, weight, eps)

    until.register_hook(compute_again)
    storage.resize_(0)
