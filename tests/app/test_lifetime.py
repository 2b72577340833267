"""Nothing outlives the driver, however it ends: real processes, real kills."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from beam_rl import lifetime, watchdog

DRIVER = """
import subprocess, sys, time
from multiprocessing import get_context, shared_memory
from pathlib import Path
from beam_rl import lifetime

def renamed():  # as Ray and vLLM rename their processes
    import setproctitle
    setproctitle.setproctitle("ray::Worker")
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    time.sleep(600)

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with lifetime.bounded(folder / "logs") as temp:
        (temp / "session_2026" / "logs").mkdir(parents=True)
        (temp / "session_2026" / "logs" / "raylet.out").write_text("log")
        child = get_context("spawn").Process(target=renamed)
        child.start()
        memory = shared_memory.SharedMemory(create=True, size=4096)
        (folder / "made").write_text(f"{temp}\\n{memory.name}")
        (folder / "made").rename(folder / "ready")
        if sys.argv[2] == "return":
            while not (folder / "go").exists():
                time.sleep(0.05)
            sys.exit(0)
        time.sleep(600)
"""


def start(tmp_path: Path, how: str) -> subprocess.Popen[bytes]:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    return subprocess.Popen([sys.executable, str(script), str(tmp_path), how])


def wait_for(path: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.05)


def marked(marker: str) -> list[psutil.Process]:
    """Processes that carry the run's marker, the watchdog aside."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(watchdog.VARIABLE) == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT", "return"])
def test_no_process_shared_memory_or_temporary_file_is_left(tmp_path: Path, how: str) -> None:
    driver = start(tmp_path, how)
    wait_for(tmp_path / "ready")
    temp, memory = (tmp_path / "ready").read_text().splitlines()
    children = psutil.Process(driver.pid).children(recursive=True)
    dog = next(child for child in children if "watchdog.py" in " ".join(child.cmdline()))
    (marker,) = (argument for argument in dog.cmdline() if len(argument) == 16 and "/" not in argument)
    if how == "return":
        (tmp_path / "go").touch()
    else:
        end = time.monotonic() + 60
        while not any("import time; time.sleep(600)" in process.cmdline() for process in marked(marker)):
            assert time.monotonic() < end, "the renamed child has no child of its own"
            time.sleep(0.05)
        os.kill(driver.pid, getattr(signal, how))
    driver.wait(timeout=60)
    end = time.monotonic() + 60
    while (dog.is_running() or marked(marker)) and time.monotonic() < end:
        time.sleep(0.05)  # the driver's resource tracker ends a moment after the driver
    assert marked(marker) == []
    assert not Path(temp).exists()
    assert not (Path("/dev/shm") / memory).exists()
    assert (tmp_path / "logs" / "ray" / "raylet.out").read_text() == "log"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_come_together_interrupt_once(
    sent: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`timeout` signals its child and then the group: the second one left requests behind that the first cancelled."""
    monkeypatch.setattr(lifetime, "TOGETHER_SECONDS", 60.0)  # however busy the machine is
    with lifetime.bounded(tmp_path):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(sent)
        signal.raise_signal(sent)


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    """A shell without job control ignores Ctrl-C for what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with lifetime.bounded(tmp_path):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_runs_weights_in_flight_are_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the write and the engine's mapping of it, nobody holds a file of weights."""
    for name in ("beam-weights-host-mine-1-1.safetensors", "beam-weights-host-other-1-1.safetensors", "psm_left"):
        (tmp_path / name).touch()
    monkeypatch.setattr(watchdog, "SHARED_MEMORY", tmp_path)
    watchdog.clean_shared_memory("mine", started=0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["beam-weights-host-other-1-1.safetensors"]


def test_a_semaphore_that_another_run_has_just_made_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked for in maps that were read before it was made, it seemed to be nobody's, and its owner lost it."""
    monkeypatch.setattr(watchdog, "SHARED_MEMORY", tmp_path)
    theirs, left = tmp_path / "sem.theirs", tmp_path / "sem.left"
    theirs.touch()
    left.touch()
    inode = theirs.stat().st_ino
    maps = iter([set(), {inode}])  # its maker maps it between the two looks
    monkeypatch.setattr(watchdog, "mapped", lambda: next(maps))
    watchdog.clean_shared_memory("mine", started=0.0)
    assert theirs.exists()
    assert not left.exists()


def test_another_runs_processes_are_not_touched(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env=os.environ | {watchdog.VARIABLE: "another"}
    )
    try:
        (tmp_path / "go").touch()
        driver = start(tmp_path, "return")
        driver.wait(timeout=60)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
