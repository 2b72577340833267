"""Fixtures of the whole suite."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

GOLDEN = Path(__file__).parent / "golden"
REFERENCE = Path(__file__).parents[1] / "requirements" / "reference.txt"


def pytest_configure() -> None:
    """A shell lets its background jobs ignore SIGINT; the tests of interrupts need it, here and in child processes."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a reference model ("tiny", "groups", "long"): a checkpoint, and reference.safetensors beside it."""
    spec = importlib.util.spec_from_file_location("golden_weights", GOLDEN / "weights.py")
    assert spec is not None
    assert spec.loader is not None
    weights = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(weights)
    root = tmp_path_factory.mktemp("golden")

    def folder(name: str) -> Path:
        path = root / name
        return path if path.exists() else weights.write(name, path)

    return folder


@pytest.fixture(scope="session")
def reference_environment() -> dict[str, str]:
    """Environment for a process in which transformers is the one that has its own Beam.

    Nothing else that is installed accepts that version, so it lies in a folder of the virtual environment that only
    such processes look into; the first test that wants it installs it.
    """
    folder = Path(sys.prefix) / "reference"
    installed = folder / REFERENCE.name
    with FileLock(f"{folder}.lock"):
        if not installed.is_file() or installed.read_bytes() != REFERENCE.read_bytes():
            shutil.rmtree(folder, ignore_errors=True)
            command = [sys.executable, "-m", "uv", "pip", "install", "-q", "--no-deps", "--require-hashes"]
            subprocess.run([*command, "--target", str(folder), "-r", str(REFERENCE)], check=True, timeout=500)
            shutil.copyfile(REFERENCE, installed)
    return os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
