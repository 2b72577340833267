"""Triton kernels compute what `numerics` defines: values to the rounding, gradients against float64.

On a GPU they run there; elsewhere Triton interprets them, in a process of its own, because it decides when a kernel is
defined whether that is so.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKS = Path(__file__).with_name("kernel_checks.py")


@pytest.mark.parametrize(
    "name",
    [
        "norm",
        "boundary",
        "swiglu",
        "combine",
        "spread",
        "experts",
        "gradients",
        "products",
        "claimed",
        "heads",
        "gate",
        "head",
        "route",
        "sort",
    ],
)
def test_a_kernel_is_its_definition(name: str) -> None:
    environment = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    result = subprocess.run(
        [sys.executable, CHECKS, name], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]
