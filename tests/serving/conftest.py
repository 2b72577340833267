"""Two real servers of a tiny model in float32, shared by the tests of this folder; a test leaves version A served."""

import importlib.util
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest


def _live() -> Any:
    spec = importlib.util.spec_from_file_location("beam_live", Path(__file__).with_name("live.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


LIVE = _live()


@pytest.fixture(scope="package")
def live() -> Any:
    """The module `live`."""
    return LIVE


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints A and B of one architecture, with manifests and the trainer's fingerprints."""
    root = tmp_path_factory.mktemp("models")
    made = {"A": LIVE.write_model(root / "A", 1), "B": LIVE.write_model(root / "B", 1, change=0.01)}
    for folder in made.values():
        LIVE.describe(folder)
    return made


@pytest.fixture(scope="package")
def servers(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """Two servers that start from A."""
    with LIVE.serving(models["A"], 2, tmp_path_factory.mktemp("servers")) as started:
        yield started


@pytest.fixture
def swap(servers: list[Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """`beam-rl swap` to both servers, or to other addresses; returns its report, after checking its exit code."""
    from beam_rl import cli, secret

    monkeypatch.setenv(secret.ADMIN_VARIABLE, LIVE.TOKEN)

    def run(*arguments: Any, code: int = 0, to: Sequence[str] = ()) -> dict[str, Any]:
        endpoints = [part for url in to or [one.url for one in servers] for part in ("--endpoint", url)]
        out, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(errors):
            found = cli.main(["swap", *map(str, arguments), *endpoints, "--json"])
        assert found == code, out.getvalue() + errors.getvalue()
        return json.loads(out.getvalue()) if out.getvalue() else {"error": errors.getvalue()}

    return run


@pytest.fixture
def unharmed(servers: list[Any], models: dict[str, Path], swap: Callable[..., dict[str, Any]]) -> Iterator[None]:
    """Both servers serve A before; after the test they still do, and B and then A can be swapped in."""
    assert [LIVE.serves(server) for server in servers] == ["A", "A"]
    yield
    assert [LIVE.serves(server) for server in servers] == ["A", "A"]
    assert all(server.status()["staged"] is None for server in servers)
    swap(models["B"])
    assert [LIVE.serves(server) for server in servers] == ["B", "B"]
    swap(models["A"])
