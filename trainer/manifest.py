"""Whether a checkpoint folder is whole, by Megatron's integrity manifest; read without Megatron, so in any process.

The manifest (a SHA-256 of every file) is written last: a folder that has it was written to its end, and what its
files say now shows whether they were damaged since.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

MANIFEST = "integrity.json"
STEP = re.compile(r"(?P<kind>.*?)(?P<step>\d+)")
"""A checkpoint's name: whatever it is called, and its step."""


def fault(path: Path) -> str | None:
    """What is wrong with the checkpoint folder `path`, naming the file; None if it is whole. Reads all of it."""
    if not path.is_dir():
        return "no such folder"
    if not (path / MANIFEST).is_file():
        return f"{MANIFEST} is missing, so it was never finished"
    try:
        content = json.loads((path / MANIFEST).read_bytes())
        files = dict(content["files"])
        algorithm = str(content["algorithm"])
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} is damaged"
    if algorithm not in hashlib.algorithms_available or not files:
        return f"{MANIFEST} is damaged"
    for name, expected in files.items():
        if not (path / name).is_file():
            return f"its file {name} is missing"
        with (path / name).open("rb") as stream:
            if hashlib.file_digest(stream, algorithm).hexdigest() != expected:
                return f"its file {name} is damaged"
    return None


def newest_whole(path: Path) -> Path | None:
    """The newest whole checkpoint beside `path`, which itself does not count; None if there is none.

    A step is the number at the end of a name: `folder/step_4` lies beside `folder/step_5`, and
    `folder/global_step_4/policy` beside `folder/global_step_5/policy`.
    """
    numbered, inside = (path, "") if STEP.fullmatch(path.name) else (path.parent, path.name)
    here = STEP.fullmatch(numbered.name)
    if here is None:
        return None
    steps: dict[int, Path] = {}
    for sibling in numbered.parent.glob("*"):
        found = STEP.fullmatch(sibling.name)
        if found and found["kind"] == here["kind"] and sibling != numbered:
            steps[int(found["step"])] = sibling / inside
    return next((steps[step] for step in sorted(steps, reverse=True) if fault(steps[step]) is None), None)
