"""Digests of an engine's weights, computed on the GPU: vLLM's own are SHA-256 on one core, seconds for 14 GB."""

import torch
from skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap import NewInferenceWorkerWrap
from torch import Tensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ODD = -7046029254386353131
"""2^64 over the golden ratio: weights far apart for neighbouring places."""
PIECE = 2**24
"""Elements at a time, so that little memory is needed beside the weights."""


class Digests(NewInferenceWorkerWrap):
    """SkyRL's extension of vLLM's workers, which also answers `collective_rpc("beam_digests")`."""

    def beam_digests(self) -> dict[str, str]:
        """A digest of every parameter."""
        found = {name: digest(tensor) for name, tensor in self.model_runner.get_model().named_parameters()}
        torch.cuda.empty_cache()
        return found


@torch.no_grad()
def digest(tensor: Tensor) -> str:
    """Sum modulo 2^64 of a tensor's bits, every element's weighted by its place: another one for other values."""
    elements = tensor.detach().contiguous().view(-1).view(INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(elements), PIECE):
        piece = elements[start : start + PIECE].long()
        places = torch.arange(start, start + len(piece), device=tensor.device)
        total += (piece * (places * ODD | 1)).sum()
    return f"{int(total) & (2**64 - 1):016x}"
