"""An evaluation's folder: `run.json` says what is being evaluated, `samples.jsonl` holds every finished sample.

A sample is one line, written in one call and forced to the disk before the next thing happens, so that a kill at any
moment loses the samples in flight and no others. One process at a time writes.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ValidationError

from beam_rl.evals.files import write_atomically
from beam_rl.evals.results import Sample, Session
from beam_rl.model.errors import BadInput

FORMAT = 1
MAY_CHANGE = {"task": frozenset({"source"}), "model": frozenset({"weight_versions", "server", "path"})}
"""What may differ when a run goes on: files and servers may have been moved, not what they hold."""
LEFT = frozenset({"samples.jsonl", "logs"})
"""What an evaluation may leave that did not come to its `run.json`."""


class Journal:
    """The folder of one evaluation; `opened` makes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "samples.jsonl"
        self._samples: dict[tuple[str, int], Sample] = {}
        self._sessions: list[Session] = []
        self._file: int | None = None

    @property
    def samples(self) -> list[Sample]:
        """The last record of every sample."""
        return list(self._samples.values())

    @property
    def done(self) -> set[tuple[str, int]]:
        """Samples that have a response; those that ended in an error are to be drawn again."""
        return {key for key, one in self._samples.items() if not one.is_error}

    @property
    def sessions(self) -> list[Session]:
        return list(self._sessions)

    def check(self, **sections: Mapping[str, Any]) -> None:
        """Compare with `run.json`, if it is there. Raises BadInput: the folder holds another evaluation.

        Sections are `task`, `sampling` and `model`, each with any of the fields of its record.
        """
        path = self.folder / "run.json"
        if not path.is_file():
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        if before.get("format") != FORMAT:
            raise BadInput(f"{path}: of another version of this program. Choose another --out.")
        for section, values in sections.items():
            for key, value in values.items():
                there = before[section].get(key)
                if key not in MAY_CHANGE.get(section, ()) and there != value:
                    raise BadInput(
                        f"{self.folder} holds another evaluation: its {section} has {key}={there!r}, this one "
                        f"{value!r}. Choose another --out, or ask for the same to go on with it."
                    )

    def describe(self, **sections: Mapping[str, Any]) -> None:
        """Write `run.json` where it is missing, else `check`."""
        path = self.folder / "run.json"
        if path.is_file():
            self.check(**sections)
        else:
            write_atomically(path, json.dumps({"format": FORMAT, **sections}, indent=1) + "\n")

    def begin(self, now: float) -> None:
        """A stretch of work begins."""
        self._append({"kind": "session", "started": now})
        self._sessions.append(Session(started=now, ended=now))

    def add(self, sample: Sample) -> None:
        """A sample is finished; it is on the disk when this returns."""
        self._append({"kind": "sample", **sample.model_dump(mode="json", exclude_defaults=True)})
        self._take(sample)

    def end(self, now: float) -> None:
        """The stretch of work is over."""
        self._append({"kind": "end", "ended": now})
        self._sessions[-1].ended = now

    def load(self) -> None:
        """Read what is there, and cut off a last line that a kill left unfinished."""
        content = self.path.read_bytes() if self.path.is_file() else b""
        whole = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:whole].split(b"\n")[:-1], 1):
            try:
                self._read(json.loads(line))
            except (ValueError, ValidationError, KeyError) as error:
                raise BadInput(f"{self.path}: line {number} is damaged ({error}). Remove it to go on.") from error
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._file, whole)
        os.lseek(self._file, 0, os.SEEK_END)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self, line: dict[str, Any]) -> None:
        kind = line.pop("kind")
        if kind == "session":
            self._sessions.append(Session(started=line["started"], ended=line["started"]))
        elif kind == "end":
            self._sessions[-1].ended = line["ended"]
        else:
            self._take(Sample.model_validate(line))

    def _take(self, sample: Sample) -> None:
        self._samples[sample.problem, sample.sample] = sample
        if self._sessions:
            self._sessions[-1].ended = max(self._sessions[-1].ended, sample.finished)

    def _append(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        before = os.lseek(self._file, 0, os.SEEK_CUR)
        try:
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
        except OSError:  # a full disk may have taken a part
            os.ftruncate(self._file, before)
            os.lseek(self._file, before, os.SEEK_SET)
            raise


@contextmanager
def opened(folder: Path) -> Iterator[Journal]:
    """The journal of a folder, which is made where it is missing, and kept from other processes until the end.

    Raises:
        BadInput: another process works there, or the folder holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"--out {folder}: is a file, a folder is wanted.")
    ours = not folder.exists() or (folder / "run.json").is_file() or not _content(folder)
    if not ours:
        raise BadInput(f"--out {folder}: is neither empty nor the folder of an evaluation.")
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BadInput(f"--out {folder}: another evaluation is running in this folder.") from None
    journal = Journal(folder)
    with contextlib.ExitStack() as stack:
        stack.callback(lock.release)
        stack.callback(journal.close)
        journal.load()
        yield journal


def _content(folder: Path) -> list[str]:
    """What lies in a folder, apart from what an evaluation that did not begin leaves."""
    return [path.name for path in folder.iterdir() if not path.name.startswith(".") and path.name not in LEFT]
