"""Whether a checkpoint folder is whole, by a manifest in Megatron's format; needs no Megatron, so works in any process.

The manifest (a SHA-256 of every file) is written last: a folder that has it was written to its end, and what its
files say now shows whether they were damaged since. Source of the format: `save_integrity_manifest` in
`megatron/core/dist_checkpointing/validation.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

MANIFEST = "integrity.json"
ALGORITHM = "sha256"
STEP = re.compile(r"(?P<kind>.*?)(?P<step>\d+)")
"""A checkpoint's name: whatever it is called, and its step."""


def digest(file: Path) -> str:
    """Hexadecimal digest of a file's content. Raises OSError: it cannot be read."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, ALGORITHM).hexdigest()


def write(path: Path, digests: Mapping[str, str]) -> None:
    """Add the manifest to the checkpoint folder `path`; files that `digests` does not name are hashed here."""
    files = dict(digests)
    for file in path.iterdir():
        if file.is_file() and file.name not in files:
            files[file.name] = digest(file)
    content = {"algorithm": ALGORITHM, "files": dict(sorted(files.items()))}
    (path / MANIFEST).write_text(json.dumps(content, indent=2))


def fault(path: Path, rank: int = 0, ranks: int = 1) -> str | None:
    """What is wrong with the checkpoint folder `path`, naming the file; None if it is whole.

    Reads every `ranks`-th file from the `rank`-th on: that many processes together read all of it.
    """
    if not os.path.isdir(path):  # False, too, where it cannot be looked at
        return "no such folder"
    if not (path / MANIFEST).is_file():
        return f"{MANIFEST} is missing, so it was never finished"
    try:
        content = json.loads((path / MANIFEST).read_bytes())
        files = dict(content["files"])
        algorithm = str(content["algorithm"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} is damaged"
    if algorithm != ALGORITHM or not files:
        return f"{MANIFEST} is damaged"
    for name, expected in list(files.items())[rank::ranks]:
        if not (path / name).is_file():
            return f"its file {name} is missing"
        try:
            found = digest(path / name)
        except OSError as error:  # of a failing disk: the other processes wait for what this one finds
            return f"its file {name} cannot be read ({error.strerror})"
        if found != expected:
            return f"its file {name} is damaged"
    return None


def beside(path: Path) -> list[Path]:
    """The other checkpoints beside `path`, whole or not, newest first.

    A step is the number at the end of a name: `folder/step_4` lies beside `folder/step_5`, and
    `folder/global_step_4/policy` beside `folder/global_step_5/policy`.
    """
    numbered, inside = (path, "") if STEP.fullmatch(path.name) else (path.parent, path.name)
    here = STEP.fullmatch(numbered.name)
    if here is None:
        return []
    steps: dict[int, Path] = {}
    for sibling in numbered.parent.glob("*"):
        found = STEP.fullmatch(sibling.name)
        if found and found["kind"] == here["kind"] and sibling != numbered:
            steps[int(found["step"])] = sibling / inside
    return [steps[step] for step in sorted(steps, reverse=True)]
