"""Hugging Face checkpoints of Beam on disk: sharded or single safetensors files, per-expert or fused experts."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from beam_rl.model.config import BeamConfig, load_config
from beam_rl.model.errors import BadInput
from beam_rl.model.tensors import hf_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_EXPERT = re.compile(r"(?P<layer>.*\.mlp\.experts\.)(?P<expert>\d+)\.(?P<projection>gate|up|down)_proj\.weight")
_COMPANIONS = ("generation_config.json", "chat_template.jinja", "added_tokens.json", "special_tokens_map.json")


class HFCheckpoint:
    """A checkpoint folder, read lazily and in parts.

    Tensors are asked for by per-expert names; where the checkpoint holds fused experts
    (`mlp.experts.gate_up_proj` [experts, 2 * intermediate, hidden], `mlp.experts.down_proj`), their slices are read.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the folder.

        Raises:
            BadInput: no folder, no safetensors, an unreadable index, or a file named in it that is missing.
        """
        self.path = Path(path)
        if not self.path.is_dir():
            raise BadInput(f"{self.path}: no such folder; give a folder with a Beam checkpoint in Hugging Face format")
        self._files = {}
        self._where: dict[str, str] = {}
        for file in self._shards():
            try:
                opened = safe_open(self.path / file, framework="pt")
            except Exception as error:  # safetensors' own error type, and OSError
                raise BadInput(f"{self.path / file}: not a readable safetensors file ({error})") from error
            self._files[file] = opened
            self._where |= dict.fromkeys(opened.keys(), file)

    def _shards(self) -> list[str]:
        index = self.path / INDEX
        if not index.is_file():
            if not (self.path / SINGLE).is_file():
                raise BadInput(f"{self.path}: neither {SINGLE} nor {INDEX}; the checkpoint's weights are missing")
            return [SINGLE]
        try:
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise BadInput(f"{index}: not an index of safetensors files ({error!r})") from error
        for file in files:
            if not (self.path / file).is_file():
                raise BadInput(f"{index} names {file}, which is missing; download the checkpoint again")
        return files

    def names(self) -> list[str]:
        """Names of the tensors as they are on disk."""
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor on disk."""
        return tuple(self._files[self._where[name]].get_slice(name).get_shape())

    def read(self, name: str, axis: int, start: int, length: int) -> Tensor:
        """Elements [start, start + length) along an axis of the tensor with this (per-expert) name."""
        stop = start + length
        if name in self._where:
            part = self._files[self._where[name]].get_slice(name)
            return part[start:stop] if axis == 0 else part[:, start:stop]
        match = _EXPERT.fullmatch(name)
        if match is None:
            raise BadInput(f"{self.path}: tensor {name} is missing")
        layer, expert = match["layer"], int(match["expert"])
        if match["projection"] == "down":
            fused, offset = f"{layer}down_proj", 0
        else:
            fused = f"{layer}gate_up_proj"
            width = self.shape(fused)[1] // 2
            offset = width if match["projection"] == "up" else 0
        part = self._files[self._where[fused]].get_slice(fused)
        if match["projection"] == "down":
            return (part[expert, start:stop] if axis == 0 else part[expert, :, start:stop]).contiguous()
        if axis == 0:
            return part[expert, offset + start : offset + stop].contiguous()
        return part[expert, offset : offset + width, start:stop].contiguous()

    def tensors(self, config: BeamConfig) -> Iterator[tuple[str, Tensor]]:
        """All tensors, whole, under per-expert names."""
        for name, shape in hf_tensors(config).items():
            yield name, self.read(name, 0, 0, shape[0])

    def validate(self, config: BeamConfig) -> None:
        """Check that the checkpoint holds exactly the config's tensors.

        Raises:
            BadInput: naming missing, unexpected and wrongly shaped tensors (the first few of each).
        """
        expected = hf_tensors(config)
        for layer in config.sparse_layers:
            prefix = f"model.layers.{layer}.mlp.experts."
            if f"{prefix}gate_up_proj" in self._where or f"{prefix}down_proj" in self._where:
                for expert in range(config.num_experts):
                    for projection in ("gate", "up", "down"):
                        del expected[f"{prefix}{expert}.{projection}_proj.weight"]
                experts, hidden, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
                expected[f"{prefix}gate_up_proj"] = (experts, 2 * width, hidden)
                expected[f"{prefix}down_proj"] = (experts, hidden, width)
        wrong = [
            f"{name} has shape {list(self.shape(name))} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in self._where and self.shape(name) != shape
        ]
        faults = [
            ("missing", [name for name in expected if name not in self._where]),
            ("unexpected", [name for name in self._where if name not in expected]),
            ("wrongly shaped", wrong),
        ]
        text = "; ".join(f"{len(names)} {kind}: {_few(names)}" for kind, names in faults if names)
        if text:
            raise BadInput(f"{self.path}: the weights do not fit config.json: {text}")


def _few(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")


def open_checkpoint(path: str | Path) -> tuple[BeamConfig, HFCheckpoint]:
    """Config and weights of a checkpoint folder, checked against each other. Raises `BadInput`."""
    config = load_config(path)
    checkpoint = HFCheckpoint(path)
    checkpoint.validate(config)
    return config, checkpoint


def save_hf(
    path: str | Path,
    config: BeamConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    shard_bytes: float = 5e9,
    copy_from: str | Path | None = None,
) -> None:
    """Write a checkpoint folder; it appears at path complete or not at all, replacing what was there.

    Args:
        path: the folder to write.
        config: written as config.json.
        tensors: (name, tensor), consumed one at a time; no more than a shard is held in memory.
        shard_bytes: size at which a file is closed and the next begun.
        copy_from: folder whose tokenizer and generation settings are copied.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as temporary:
        folder = Path(temporary) / "new"
        folder.mkdir()
        if copy_from is not None:
            for file in sorted(Path(copy_from).iterdir()):
                if file.name in _COMPANIONS or (file.is_file() and file.name.startswith("tokenizer")):
                    shutil.copyfile(file, folder / file.name)
        config.save_pretrained(folder)
        _write_shards(folder, tensors, shard_bytes)
        if path.exists():
            path.rename(Path(temporary) / "old")
        folder.rename(path)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: float) -> None:
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = parameters = 0

    def flush() -> None:
        nonlocal size
        save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()
        size = 0

    for name, tensor in tensors:
        if pending and size + tensor.nbytes > shard_bytes:
            flush()
        # A copy: the tensor may be a view of a parameter, and safetensors refuses shared memory.
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
        parameters += tensor.numel()
    if not pending:
        raise ValueError("a checkpoint needs at least one tensor")
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total, "total_parameters": parameters}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
