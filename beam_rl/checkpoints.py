"""Where a run's checkpoints lie and which of them is whole.

`checkpoints/global_step_N/` holds `policy/` (the engine's checkpoint) and `state.json` (the driver's). A checkpoint
counts once `latest_ckpt_global_step.txt` names it, and that file is replaced in one move, last of all.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from beam_rl.evals.files import write_atomically
from beam_rl.model.errors import BadInput

LATEST = "latest_ckpt_global_step.txt"


def folder(root: Path, step: int) -> Path:
    """The checkpoint after `step` training steps."""
    return root / f"global_step_{step}"


def publish(root: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Add the driver's state to a policy checkpoint already written, and make it the latest.

    Older checkpoints beyond the last `keep` are removed; a negative `keep` removes none.
    """
    where = folder(root, step)
    write_atomically(where / "state.json", json.dumps(state))
    write_atomically(root / LATEST, str(step))
    older = sorted(number for number in steps(root) if number <= step)
    for number in older[:-keep] if keep > 0 else []:
        shutil.rmtree(folder(root, number))
    return where


def latest(root: Path) -> tuple[int, dict[str, Any]] | None:
    """Step and driver state of the last whole checkpoint; None where there is none.

    Raises BadInput when the folder that should be there is not.
    """
    if not (root / LATEST).is_file():
        return None
    step = int((root / LATEST).read_text())
    state = folder(root, step) / "state.json"
    if not state.is_file():
        raise BadInput(f"{root}: the checkpoint of step {step} is named as the latest, but it is not there.")
    return step, json.loads(state.read_text())


def forget_beyond(root: Path, step: int) -> None:
    """Remove checkpoints after `step`: a run killed while saving left them unfinished."""
    for number in steps(root):
        if number > step:
            shutil.rmtree(folder(root, number))


def steps(root: Path) -> list[int]:
    """The steps that have a checkpoint folder, whole or not."""
    return [int(path.name.rpartition("_")[2]) for path in root.glob("global_step_*")]
