"""A process that outlives the driver and leaves nothing of the run behind, however the driver ends.

Run as a script with the standard library alone (`python -S -E`): it must start in milliseconds, before everything
else, and must not depend on what it cleans up. It waits on a pipe whose other end only the driver holds. When that
closes, it kills every process that carries the run's marker in its environment (and their children), then removes the
run's shared-memory files and its temporary folder, keeping Ray's logs.

usage: watchdog.py MARKER TEMP_DIR LOG_DIR  (the pipe is stdin)
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

VARIABLE = "BEAM_RL_RUN"
SHARED_MEMORY = Path("/dev/shm")
PREFIXES = ("psm_", "sem.", "torch_")
"""Shared memory of multiprocessing and torch, whose names tell nothing of the run: removed when no living process has
it mapped. Files of the weight transfer carry the marker; unmapped ones without it may be another run's, in flight."""


SETTLED = 1.0
"""Seconds after which a process that makes shared memory has mapped it."""


def main() -> None:
    marker, temp_dir, log_dir = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    started = time.time()
    while os.read(0, 4096):
        pass
    kill(f"{VARIABLE}={marker}".encode())
    clean_shared_memory(marker, started)
    keep_logs(temp_dir, log_dir)
    shutil.rmtree(temp_dir, ignore_errors=True)


def kill(marker: bytes, limit: float = 20.0) -> None:
    """SIGKILL the marked processes and their descendants until none is left, or `limit` seconds have passed.

    multiprocessing's resource trackers go last: they end by themselves after their clients, whose semaphores and shared
    memory they remove. That of the driver stays while the driver lives.
    """
    end = time.monotonic() + limit
    patience = time.monotonic() + limit / 4
    while time.monotonic() < end:
        victims, trackers = marked(marker)
        if not victims and not trackers:
            return
        if not victims and time.monotonic() > patience:
            victims = trackers
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def marked(marker: bytes) -> tuple[set[int], set[int]]:
    """Living processes with the marker in their environment, with all descendants: resource trackers apart."""
    driver = os.getppid()  # 1, or a subreaper that has no marker, once the driver is dead
    parents: dict[int, int] = {}
    found: set[int] = set()
    trackers: set[int] = set()
    for pid in processes():
        stat = read(pid, "stat").rpartition(b")")[2].split()  # after the name, which may hold anything
        if not stat or stat[0] in (b"Z", b"X"):
            continue
        parents[pid] = int(stat[1])
        if marker in read(pid, "environ").split(b"\0"):
            found.add(pid)
        if b"multiprocessing.resource_tracker" in read(pid, "cmdline"):
            trackers.add(pid)
    grew = True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        grew = bool(more)
    found -= {os.getpid(), driver}
    return found - trackers, {pid for pid in found & trackers if parents[pid] != driver}


def processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def read(pid: int, name: str) -> bytes:
    """A file of /proc/PID; empty where the process is gone or is another user's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def clean_shared_memory(marker: str, started: float) -> None:
    """Remove this run's files in /dev/shm: those named after it, and libraries' that nobody maps any more.

    Nobody's is what was listed before the maps were read and is in them neither then nor a moment later: another run
    may have made it just now, and be about to map it.
    """
    unnamed: dict[Path, int] = {}
    for path in SHARED_MEMORY.iterdir():
        try:
            stat = path.stat()
        except OSError:
            continue
        if path.is_file() and marker in path.name:
            path.unlink(missing_ok=True)
        elif (
            path.is_file()
            and path.name.startswith(PREFIXES)
            and stat.st_uid == os.getuid()
            and stat.st_ctime >= started
        ):
            unnamed[path] = stat.st_ino
    for pause in (0.0, SETTLED):
        if not unnamed:
            return
        time.sleep(pause)
        used = mapped()
        unnamed = {path: inode for path, inode in unnamed.items() if inode not in used}
    for path in unnamed:
        path.unlink(missing_ok=True)


def mapped() -> set[int]:
    """Inodes that living processes have mapped. Not names: a semaphore is mapped under another than it is found by."""
    inodes = set()
    for pid in processes():
        for line in read(pid, "maps").splitlines():
            fields = line.split(maxsplit=5)  # address, permissions, offset, device, inode, path
            inodes.add(int(fields[4]))
    return inodes


def keep_logs(temp_dir: Path, log_dir: Path) -> None:
    """Move Ray's logs out of the temporary folder that is about to go."""
    for session in temp_dir.glob("session_2*/logs"):
        if any(session.iterdir()):
            shutil.copytree(session, log_dir / "ray", dirs_exist_ok=True, ignore_dangling_symlinks=True)


if __name__ == "__main__":
    main()
