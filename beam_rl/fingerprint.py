"""The trainer's own numbers for a checkpoint's manifest: how its engine scores the fixed prompt."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from beam_rl.checkpoints import latest
from beam_rl.model.errors import BadInput
from beam_rl.rollout import manifest
from beam_rl.rollout.manifest import Fingerprint, Origin

if TYPE_CHECKING:
    from beam_rl.trainer.engine import TrainerEngine

SMALL_BYTES = 4 * 2**30
"""Weights up to which the trainer's engine is started only to make a fingerprint."""


def of_engine(engine: "TrainerEngine") -> Fingerprint:
    """The fingerprint of the engine's current weights; called on all of its ranks, like any scoring."""
    import torch

    from beam_rl.trainer.engine import Sequence

    tokens = manifest.probe_tokens(engine.hf.vocab_size)
    sample = Sequence(tokens=torch.tensor(tokens), loss_mask=torch.ones(len(tokens) - 1))
    return Fingerprint(tokens, engine.score([sample], replay=False, temperature=1.0).logprobs[0].tolist(), "trainer")


def write_manifest(folder: Path, engine: "TrainerEngine", origin: Origin | None = None) -> None:
    """Add the manifest to a checkpoint that the engine has just exported; called on all ranks, the first one writes."""
    import torch.distributed as dist

    found = of_engine(engine)
    if dist.get_rank() == 0:
        manifest.write(folder, origin, found)


def apart(folder: Path) -> Fingerprint:
    """The fingerprint of a checkpoint on disk, by a trainer's engine in a process of its own.

    Raises:
        BadInput: the engine could not score it, with the end of what it said.
    """
    command = [sys.executable, "-m", "beam_rl.fingerprint", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        tail = "\n".join(done.stderr.splitlines()[-5:])
        raise BadInput(f"{folder}: the trainer's engine could not score it; --no-fingerprint goes without.\n{tail}")
    return Fingerprint(**json.loads(lines[-1]))


def is_current(run_dir: Path) -> bool:
    """Whether a run's export is of its last checkpoint."""
    found, known = latest(run_dir / "checkpoints"), None
    if (run_dir / "export").is_dir():
        known = manifest.read(run_dir / "export")
    return found is None or (known is not None and known.origin is not None and known.origin.step == found[0])


def main(folder: str) -> None:
    """Print the fingerprint of a checkpoint as a line of JSON."""
    from beam_rl.model.config import load_config
    from beam_rl.trainer.engine import EngineConfig, TrainerEngine

    config = load_config(folder)
    dtype = "float32" if str(config.dtype).endswith("float32") else "bfloat16"
    engine = TrainerEngine(EngineConfig(dtype=dtype, optimizer=None))  # type: ignore[arg-type]
    engine.build(config)
    engine.load_hf(folder)
    print(json.dumps(asdict(of_engine(engine))))


if __name__ == "__main__":
    main(sys.argv[1])
