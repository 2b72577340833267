"""What an exported checkpoint should be: every tensor's digest, where it comes from, how its model scores a prompt.

`beam_manifest.json` is written beside the weights at export. Whoever loads them elsewhere can then tell that no bit
changed on the way (digests), that they are newer than what runs (origin), and that the model they give is the model
that was trained (fingerprint).
"""

import hashlib
import json
import math
import random
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from beam_rl.model.checkpoint import open_checkpoint
from beam_rl.model.errors import BadInput

MANIFEST = "beam_manifest.json"
PROBE_TOKENS = 48
"""Tokens of the prompt that fingerprints are made with."""
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Types of checkpoints' tensors, by safetensors' names."""
LABEL = re.compile(r"[A-Za-z0-9._-]{1,48}")
"""What a version may be called: it goes into headers."""


@dataclass(frozen=True)
class Entry:
    """One tensor."""

    shape: tuple[int, ...]
    dtype: str
    """By safetensors' name."""
    sha256: str
    """Of its bytes, row-major, little-endian."""


@dataclass(frozen=True)
class Origin:
    """Where weights come from; within a run they are ordered by step."""

    run: str
    step: int


@dataclass(frozen=True)
class Fingerprint:
    """How the model scores a fixed prompt."""

    tokens: list[int]
    logprobs: list[float]
    """Of the tokens after the first, at temperature 1: one fewer than the tokens."""
    source: str
    """Whose numbers these are: "trainer", or the name of what computed them."""

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.tokens) - 1 or not all(map(math.isfinite, self.logprobs)):
            raise ValueError("a fingerprint needs one finite log-prob for every token after the first")


@dataclass(frozen=True)
class Manifest:
    """Contents of the file."""

    tensors: dict[str, Entry]
    """By Hugging Face name, experts one by one."""
    origin: Origin | None = None
    fingerprint: Fingerprint | None = None
    format: int = field(default=1)

    @property
    def digest(self) -> str:
        """Digest of all tensors together: equal for equal weights."""
        lines = [f"{name} {entry.dtype} {entry.sha256}\n" for name, entry in sorted(self.tensors.items())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        size = {"F32": 4, "BF16": 2, "F16": 2}
        return sum(math.prod(entry.shape) * size[entry.dtype] for entry in self.tensors.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"digest": self.digest}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The manifest of plain values. Raises ValueError: they are not a manifest's."""
        try:
            if content["format"] != 1:
                raise ValueError(f"format {content['format']!r} is not known")
            entries = {
                str(name): Entry(tuple(entry["shape"]), entry["dtype"], entry["sha256"])
                for name, entry in content["tensors"].items()
            }
            origin, fingerprint = content.get("origin"), content.get("fingerprint")
            made = cls(
                entries,
                None if origin is None else Origin(str(origin["run"]), int(origin["step"])),
                None if fingerprint is None else Fingerprint(**fingerprint),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a manifest ({error!r})") from error
        if content.get("digest", made.digest) != made.digest:
            raise ValueError("its own digest does not fit: the file was damaged")
        return made


def probe_tokens(vocabulary: int) -> list[int]:
    """The fixed prompt of models with this many tokens."""
    draw = random.Random(vocabulary)
    return [draw.randrange(vocabulary) for _ in range(PROBE_TOKENS)]


def entry(tensor: Tensor) -> Entry:
    """Shape, type and digest of a tensor."""
    return Entry(tuple(tensor.shape), DTYPES[tensor.dtype], hashlib.sha256(raw(tensor)).hexdigest())


def raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes, row-major."""
    return memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def compute(folder: Path, origin: Origin | None = None, fingerprint: Fingerprint | None = None) -> Manifest:
    """The manifest of a checkpoint as it lies on disk; reads all of it. Raises `BadInput`."""
    config, checkpoint = open_checkpoint(folder)
    return Manifest({name: entry(tensor) for name, tensor in checkpoint.tensors(config)}, origin, fingerprint)


def write(folder: Path, origin: Origin | None = None, fingerprint: Fingerprint | None = None) -> Manifest:
    """Add its manifest to a checkpoint that was just exported. Raises `BadInput`."""
    manifest = compute(folder, origin, fingerprint)
    _write(folder, manifest)
    return manifest


def add_origin(folder: Path, origin: Origin) -> None:
    """Say where an exported checkpoint comes from. Raises `BadInput`: it has no manifest."""
    manifest = read(folder)
    if manifest is None:
        raise BadInput(f"{folder}: has no {MANIFEST}")
    _write(folder, replace(manifest, origin=origin))


def _write(folder: Path, manifest: Manifest) -> None:
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=f".{MANIFEST}.", delete=False) as file:
        json.dump(manifest.to_dict(), file)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(folder / MANIFEST)


def read(folder: Path) -> Manifest | None:
    """A folder's manifest; None where it has none. Raises `BadInput`: it is damaged."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        return Manifest.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise BadInput(f"{path}: {error}; export the checkpoint again") from error


def differences(found: Mapping[str, Entry], expected: Mapping[str, Entry], *, digests: bool) -> list[str]:
    """What is wrong with the tensors found, the first few of each kind by name; empty where nothing is."""
    both = found.keys() & expected.keys()
    faults: Iterator[tuple[str, set[str]]] = iter(
        [
            ("missing", expected.keys() - found.keys()),
            ("unexpected", found.keys() - expected.keys()),
            ("of another shape", {name for name in both if found[name].shape != expected[name].shape}),
            ("of another type", {name for name in both if found[name].dtype != expected[name].dtype}),
            ("changed", {name for name in both if digests and found[name].sha256 != expected[name].sha256}),
        ]
    )
    return [
        f"{len(names)} {kind}: {', '.join(sorted(names)[:3])}{', …' if len(names) > 3 else ''}"
        for kind, names in faults
        if names
    ]
