"""What `beam-rl serve` tells the process that serves, through a file that only its user can read.

vLLM builds its middleware without arguments, so the settings travel by a path in the environment. Tokens are in files
of their own beside it: neither a command line nor an environment ever holds one.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

VARIABLE = "BEAM_RL_SERVE"
"""Environment variable with the settings file's path."""

Access = Literal["open", "admin"]


@dataclass(frozen=True)
class ServeSettings:
    """Settings of the guard and of the weights' control in one server."""

    model: str
    """Folder that the engine was started from, for its configuration and tokenizer."""
    store: str
    """Folder for packed weights, shared with the engine's workers; /dev/shm keeps them in memory."""
    prefix: str
    """Start of the names of this server's files in the store."""
    initial: str
    """Packed file of the weights that the engine starts from; its version is described beside it (`swap_store`)."""
    dtype: str
    """The engine's dtype, "float32" or "bfloat16": it decides how near log-probs must be."""
    admin_token_file: str | None = None
    """File with the control plane's token; None closes the control plane to everybody."""
    api_key_file: str | None = None
    """File with the data plane's key; None leaves the data plane open."""
    health: Access = "open"
    """Who may GET /health."""
    metrics: Access = "admin"
    """Who may GET /metrics."""
    max_body_bytes: int = 16 * 2**20
    """Largest request body that is read."""
    body_seconds: float = 30.0
    """Time in which a request's body must have arrived."""

    def write(self, path: Path) -> None:
        """Write the file, readable by its owner alone."""
        write_private(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls) -> Self:
        """The settings of this process. Raises RuntimeError: it was not started by `beam-rl serve`."""
        path = os.environ.get(VARIABLE)
        if path is None:
            raise RuntimeError(f"{VARIABLE} is not set: Beam's guard works in servers that `beam-rl serve` starts")
        content: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**content)


def write_private(path: Path, text: str) -> None:
    """Create a file that its owner alone can read, at no moment otherwise."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
