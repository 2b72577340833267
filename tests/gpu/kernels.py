"""The Triton kernels against `numerics`, on the GPU itself: in bfloat16, too, which their interpreter cannot round."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKS = Path(__file__).parents[1] / "model" / "kernel_checks.py"


def run(report: Callable[[str, Any], None]) -> None:
    checks = runpy.run_path(str(CHECKS))
    for name in sorted(name for name in checks if name.startswith("check_")):
        checks[name]()
        report(name.removeprefix("check_"), "equal")
