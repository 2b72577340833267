"""MXFP8 linears split over two tensor-parallel ranks compute, communicate and differentiate as the whole ones."""

import subprocess
import sys
from pathlib import Path


def test_two_ranks_multiply_and_differentiate_as_one() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).parent / "mxfp8_ranks.py"
    done = subprocess.run([*launcher, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
