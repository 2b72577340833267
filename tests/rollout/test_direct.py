"""Weight updates straight into an engine's parameters (`direct/*_checks.py`), in a process of their own.

vLLM's CPU engines look through all loaded modules when they start and fail on what SkyRL's receivers bring in; the
engines of this folder's other tests run in this process.
"""

import subprocess
import sys
from pathlib import Path


def test_direct_updates() -> None:
    checks = Path(__file__).with_name("direct")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "--import-mode=importlib", "-p", "no:cacheprovider"]
    command += ["-o", "python_files=*_checks.py", str(checks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
