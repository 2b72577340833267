"""Weight transfer through a file in shared memory: the trainer's half.

The trainer writes all weights, under their Hugging Face names, into one safetensors file that every engine maps into
memory: no process group, no GPU, and the same format as a checkpoint. `/dev/shm` serves one host, any shared folder
serves several. The file lives for one transfer only. This is the transport for CPU runs and small models; it holds one
full copy of the weights, so big models on GPUs use vLLM's NCCL transport.

This half imports neither vLLM nor SkyRL, so that a training process does not pay for them. It has the shape that vLLM's
`TrainerWeightTransferEngine` and SkyRL's `SkyrlTrainerCapabilities` describe. `receive` is the other half.
"""

import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import psutil
from safetensors.torch import save_file
from torch import Tensor

BACKEND = "beam_shm"
"""Name of the transport in vLLM's factories and in `weight_transfer_config`."""
DIRECT_BACKENDS = IPC_BACKEND, NCCL_BACKEND = "beam_ipc", "beam_nccl"
"""Names of the receiving halves on GPUs (`receive_gpu`), the same device's and other devices'; SkyRL's halves send."""
RUN_VARIABLE = "BEAM_RL_RUN"
"""Environment variable with a run's name, which its files carry, so that whoever ends the run finds them."""


class WeightSource(Protocol):
    """The trainer's weights, read anew at every transfer; iterating may run collectives on all ranks."""

    def __iter__(self) -> Any:
        """Iterator over (Hugging Face name, full tensor)."""


class SyncClient(Protocol):
    """The engines' control plane: vLLM's `VLLMWeightSyncClient` and SkyRL's reset of the prefix cache."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...
    def reset_prefix_cache(self, reset_running_requests: bool = True) -> None: ...


@dataclass
class ShmTrainerInit:
    """How a trainer rank takes part."""

    backend: ClassVar[str] = BACKEND

    directory: str = "/dev/shm"
    """Folder that the trainer's sending rank and all engines can read."""
    rank: int = field(kw_only=True)
    """This trainer process's rank; rank 0 sends."""

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class ShmTrainer:
    """Sends the trainer's weights to all engines; `send_weights` is called on every trainer rank."""

    init_info_cls = ShmTrainerInit

    # What SkyRL's worker asks of an engine (`SkyrlTrainerCapabilities`).
    skyrl_handles_prefix_cache_reset = True
    skyrl_force_disable_expandable_segments = False
    skyrl_empty_cache_after_send = False
    skyrl_draft_source = None

    def __init__(self, init_info: ShmTrainerInit, client: SyncClient, source: WeightSource) -> None:
        self.client = client
        self.source = source
        self.is_sender = init_info.is_sender
        self.version = 0
        """Transfers made; the engines carry it as their weight version."""
        self._directory = Path(init_info.directory)
        self._reset_prefix_cache = True

    @classmethod
    def trainer_init(cls, init_info: ShmTrainerInit, *, client: SyncClient, source: WeightSource) -> Self:
        """Return a ready engine; the sending rank also introduces itself to the engines."""
        self = cls(init_info, client, source)
        if self.is_sender:
            remove_orphans(self._directory)
            client.init_weight_transfer_engine({})
        return self

    def skyrl_set_reset_prefix_cache(self, reset: bool) -> None:
        """Whether the next transfers drop cached prefixes, as they must unless stale prefixes are wanted."""
        self._reset_prefix_cache = reset

    def send_weights(self) -> None:
        """Send all weights, then drop the engines' cached prefixes and raise the version.

        Raises:
            RuntimeError: an engine refused the weights, with its reason; engines keep their weights then.
        """
        weights = {name: _own_storage(tensor) for name, tensor in self.source}
        if not self.is_sender:
            return
        run = os.environ.get(RUN_VARIABLE, "run")
        path = self._directory / f"{_prefix()}-{run}-{os.getpid()}-{self.version + 1}.safetensors"
        try:
            save_file(weights, path)
            self.client.start_weight_update()
            self.client.update_weights({"path": str(path)})
            self.client.finish_weight_update(weight_version=str(self.version + 1))
        finally:
            path.unlink(missing_ok=True)
        if self._reset_prefix_cache:
            self.client.reset_prefix_cache()
        self.version += 1

    def shutdown(self) -> None:
        """Nothing is held between transfers."""


def remove_orphans(directory: Path) -> None:
    """Remove files that trainers of this host left behind when they were killed during a transfer."""
    for path in directory.glob(f"{_prefix()}-*.safetensors"):
        match = re.fullmatch(r".*-(\d+)-\d+\.safetensors", path.name)
        if match and not psutil.pid_exists(int(match[1])):
            path.unlink(missing_ok=True)


def _prefix() -> str:
    return f"beam-weights-{socket.gethostname()}"


def _own_storage(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, contiguous and alone in its memory, as safetensors wants it."""
    tensor = tensor.detach().cpu().contiguous()
    alone = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone()
