"""A server's weights on disk: one packed file a version, which the engine loads from and rolls back to.

A packed file is a safetensors file with every tensor of the checkpoint, experts one by one; it is what the receiver
(`receive`) takes. Packing streams: it holds one tensor at a time. Files are private to the user, and in /dev/shm they
are memory, gone with the machine; `beam-rl serve` removes them when the server ends, however it ends.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import torch
from torch import Tensor

from beam_rl.rollout.manifest import DTYPES, Entry, Manifest, raw
from beam_rl.rollout.serve_settings import write_private

RESERVE = 64 * 2**20
"""Bytes that a staged version leaves free."""


class Unfit(Exception):
    """Weights that this server does not take; the reason names what is wrong."""


@dataclass(frozen=True)
class Version:
    """One set of weights that a server has."""

    name: str
    """What responses call it: the same name means the same weights."""
    path: Path
    """Its packed file."""
    manifest: Manifest
    """Of what is in the file; an adapter's merged weights have none of their own, so it is computed."""
    base: str | None = None
    """Name of the version that an adapter was merged into; None for full weights."""
    own: tuple[list[int], list[float]] | None = None
    """A prompt and its log-probs as this server measured them when the version last went into service."""

    def with_own(self, tokens: list[int], logprobs: list[float]) -> "Version":
        """The version with this server's measurement."""
        return replace(self, own=(tokens, logprobs))

    @property
    def intact(self) -> bool:
        """Whether the packed file is there and whole."""
        return self.path.is_file() and self.path.stat().st_size > self.manifest.bytes

    def to_file(self) -> None:
        """Describe the version beside its packed file."""
        content = {"name": self.name, "manifest": self.manifest.to_dict()}
        write_private(self.path.with_suffix(".json"), json.dumps(content))

    @classmethod
    def of_file(cls, path: Path) -> "Version":
        """The version that was described beside a packed file."""
        content = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        return cls(content["name"], path, Manifest.from_dict(content["manifest"]))

    def remove(self) -> None:
        """Delete its files, if it has any; the engine keeps what it has loaded."""
        if self.path == Path():  # of a dry run
            return
        self.path.unlink(missing_ok=True)
        self.path.with_suffix(".json").unlink(missing_ok=True)


@dataclass
class Packed:
    """What packing found out."""

    entries: dict[str, Entry] = field(default_factory=dict)
    not_finite: list[str] = field(default_factory=list)
    """Tensors with a NaN or an infinity."""


def pack(
    tensors: Iterable[tuple[str, Tensor]], layout: Mapping[str, tuple[tuple[int, ...], str]], out: Path | None
) -> Packed:
    """Write tensors into one file, digesting them on the way.

    Args:
        tensors: (name, tensor) in the layout's order, each read once.
        layout: shape and safetensors' type of each.
        out: the file, which must not exist; None only reads and digests.

    Raises:
        Unfit: a tensor is not as in the layout.
        OSError: the file cannot be written; nothing is left of it.
    """
    packed = Packed()
    if out is None:
        for name, tensor in tensors:
            _take(packed, name, tensor, layout)
        return packed
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_header(layout))
            for name, tensor in tensors:
                file.write(_take(packed, name, tensor, layout))
    except BaseException:
        out.unlink(missing_ok=True)
        raise
    return packed


def _take(packed: Packed, name: str, tensor: Tensor, layout: Mapping[str, tuple[tuple[int, ...], str]]) -> memoryview:
    expected, found = layout[name], (tuple(tensor.shape), DTYPES.get(tensor.dtype, str(tensor.dtype)))
    if found != expected:
        raise Unfit(f"{name} is {found[1]} {list(found[0])}, the running model's is {expected[1]} {list(expected[0])}")
    content = raw(tensor)
    packed.entries[name] = Entry(*found, hashlib.sha256(content).hexdigest())
    if not bool(torch.isfinite(tensor).all()):
        packed.not_finite.append(name)
    return content


def _header(layout: Mapping[str, tuple[tuple[int, ...], str]]) -> bytes:
    """The head of a safetensors file: its length in 8 bytes, then JSON, padded to a multiple of 8."""
    sizes, start, fields = {"F32": 4, "BF16": 2, "F16": 2}, 0, {}
    for name, (shape, dtype) in layout.items():
        stop = start + sizes[dtype] * int(torch.Size(shape).numel())
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps({"__metadata__": {"format": "pt"}} | fields).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def check_space(store: Path, size: int) -> None:
    """Raise Unfit: a version of this many bytes finds no room."""
    free = shutil.disk_usage(store).free
    if _in_memory(store):
        free = min(free, psutil.virtual_memory().available)
    if free < size + RESERVE:
        raise Unfit(f"{store} has {free:,} bytes free, staging takes {size + RESERVE:,}")


def _in_memory(store: Path) -> bool:
    where = [part for part in psutil.disk_partitions(all=True) if store.resolve().is_relative_to(part.mountpoint)]
    return bool(where) and max(where, key=lambda part: len(part.mountpoint)).fstype in ("tmpfs", "ramfs")
