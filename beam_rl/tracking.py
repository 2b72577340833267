"""SkyRL's tracker with a W&B run that survives a restart."""

import os
import secrets
from pathlib import Path
from typing import Any

from skyrl.train.utils.tracking import Tracking

STEP = "train/step"
"""W&B's x axis. Its own step may never go back, so after a restart it would drop the repeated steps."""


class RunTracking(Tracking):
    """`Tracking` whose W&B run id is kept in the run's folder, and whose steps may be logged again."""

    def __init__(self, folder: Path, **arguments: Any) -> None:
        if arguments["backend"] == "wandb":
            os.environ["WANDB_RUN_ID"] = run_id(folder / "wandb_run_id")
            os.environ["WANDB_RESUME"] = "allow"
            os.environ.setdefault("WANDB_DIR", str(folder))
        super().__init__(**arguments)
        if self.backend == "wandb":
            self.logger.define_metric(STEP)
            self.logger.define_metric("*", step_metric=STEP)

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        if self.backend == "wandb":
            self.logger.log({**data, STEP: step}, commit=commit)
        else:
            super().log(data, step, commit)


def run_id(path: Path) -> str:
    """The W&B run id in `path`, chosen and written there the first time."""
    if not path.is_file():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()
