"""Fixtures of the whole suite."""

import importlib.util
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


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
