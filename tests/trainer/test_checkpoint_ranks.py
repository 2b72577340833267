"""A checkpoint's files are written, hashed and verified by all ranks; one of them alone would take hours."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).parent / "checkpoint_ranks.py"


def test_two_ranks_share_the_work_and_agree(golden: Callable[[str], Path], tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(SCRIPT), str(golden("tiny")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
