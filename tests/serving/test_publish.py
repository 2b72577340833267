"""Training publishes into live servers, and does not notice when they misbehave."""

import shutil
import socket
import threading
from pathlib import Path
from typing import Any

from beam_rl.publish import Publisher
from beam_rl.rollout import manifest


def test_versions_of_a_run_reach_the_servers_named_by_their_step(
    live: Any, servers: list[Any], models: dict[str, Path], swap: Any, tmp_path: Path
) -> None:
    notes: list[str] = []
    publisher = Publisher([one.url for one in servers], live.TOKEN, tmp_path / "run", notes.append, every=2)
    asked = []

    def export(folder: Path) -> None:
        asked.append(folder.name)
        shutil.copytree(models["B"], folder)

    for step in (1, 2, 3):
        publisher.step(step, export)
    publisher.close(120)
    assert notes == []
    assert asked == ["step-2"]
    assert publisher.published == 2
    assert {one.status()["version"].rpartition("-")[0] for one in servers} == {"step-2"}
    assert not list((tmp_path / "run" / "publish").iterdir())
    swap(models["A"])


def test_training_neither_waits_for_a_silent_server_nor_ends_with_it(models: dict[str, Path], tmp_path: Path) -> None:
    """The server accepts connections and never answers; a second address refuses them."""
    notes: list[str] = []
    with socket.socket() as silent, socket.socket() as closed:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        closed.bind(("127.0.0.1", 0))
        urls = [f"http://127.0.0.1:{one.getsockname()[1]}" for one in (silent, closed)]
        publisher = Publisher(urls, "a-token-of-enough-characters", tmp_path / "run", notes.append, timeout=3)
        written = []
        for step in (1, 2, 3):
            publisher.step(step, lambda folder: written.append(shutil.copytree(models["A"], folder)))
        assert publisher.published is None
        assert len(written) >= 1
        publisher.close(60)
    assert publisher.failures >= 1
    assert any("is not served" in note for note in notes)
    assert not any(thread.name == "publish" and thread.is_alive() for thread in threading.enumerate())


def test_a_full_disk_costs_a_version_not_the_run(tmp_path: Path) -> None:
    notes: list[str] = []
    publisher = Publisher(["http://127.0.0.1:1"], "a-token-of-enough-characters", tmp_path, notes.append)

    def export(folder: Path) -> None:
        folder.mkdir(parents=True)
        raise OSError(28, "No space left on device")

    publisher.step(1, export)
    publisher.close(60)
    assert not any(thread.name == "publish" and thread.is_alive() for thread in threading.enumerate())
    assert "could not be written" in notes[0]
    assert not list((tmp_path / "publish").iterdir())


def test_the_newest_version_goes_next_and_those_it_overtook_are_gone(tmp_path: Path, monkeypatch: Any) -> None:
    """While one was on its way and one waited, newer versions were not written: the last was never served."""
    started, go_on, sent = threading.Event(), threading.Event(), []

    def publish(self: Publisher, step: int, folder: Path) -> None:
        sent.append((step, folder.is_dir()))
        started.set()
        go_on.wait(30)

    monkeypatch.setattr(Publisher, "_publish", publish)
    monkeypatch.setattr(manifest, "add_origin", lambda folder, origin: None)
    publisher = Publisher(["http://127.0.0.1:1"], "a-token-of-enough-characters", tmp_path, print)
    for step in (1, 2, 3, 4):
        publisher.step(step, lambda folder: folder.mkdir(parents=True))
        started.wait(30)
    go_on.set()
    publisher.close(30)
    assert sent == [(1, True), (4, True)]
    assert not list((tmp_path / "publish").iterdir())
