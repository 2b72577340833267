"""Staging: weights that somebody wants to serve are verified against what runs, and packed, before anything stops."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from torch import Tensor

from beam_rl.model.checkpoint import open_checkpoint
from beam_rl.model.config import BeamConfig, load_config
from beam_rl.model.errors import BadInput
from beam_rl.model.tensors import hf_tensors
from beam_rl.rollout import manifest as manifests
from beam_rl.rollout.manifest import Fingerprint, Manifest, Origin
from beam_rl.rollout.swap_adapter import Adapter
from beam_rl.rollout.swap_store import Unfit, Version, pack

Kind = Literal["checkpoint", "adapter"]
IRRELEVANT = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures", "use_cache")
"""Fields of config.json that say nothing about what the model computes."""


@dataclass(frozen=True)
class Wanted:
    """What a client asks a server to stage."""

    weights: str
    """Folder of a checkpoint or of a PEFT adapter, as the server's host sees it."""
    kind: Kind
    label: str | None = None
    """Name for the version; by default its step, or the folder's name."""
    fingerprint: Fingerprint | None = None
    """The trainer's numbers, where the folder has none of its own."""
    allow_older: bool = False
    """Take weights from an earlier step of the same run than those that are served."""


def stage(wanted: Wanted, model: Path, current: Version, base: Version, out: Path | None) -> Version:
    """Verify weights and pack them.

    Args:
        model: folder with the running model's config.json and tokenizer.
        current: the version that is served.
        base: the full weights that an adapter goes onto.
        out: packed file to write; None verifies everything and writes nothing.

    Raises:
        Unfit: naming what is wrong; nothing was written.
    """
    folder = Path(wanted.weights)
    config = load_config(model)
    layout = {name: (entry.shape, entry.dtype) for name, entry in base.manifest.tensors.items()}
    try:
        known = manifests.read(folder)
        _check_order(known.origin if known else None, current.manifest.origin, wanted.allow_older)
        if wanted.kind == "checkpoint":
            packed = pack(_checkpoint(folder, model, config, known, base), layout, out)
        else:
            with safe_open(base.path, "pt") as file:
                packed = pack(Adapter(folder, config).merged(file.get_tensor), layout, out)
    except (BadInput, SafetensorError) as error:
        raise Unfit(str(error)) from error
    except OSError as error:
        raise Unfit(f"staging {folder} failed: {error}") from error
    try:
        if packed.not_finite:
            raise Unfit(f"{folder}: values that are not finite in {', '.join(packed.not_finite[:3])}")
        if known is not None and wanted.kind == "checkpoint":
            faults = manifests.differences(packed.entries, known.tensors, digests=True)
            if faults:
                raise Unfit(f"{folder} is not what was exported there: {'; '.join(faults)}")
        own = known.fingerprint if known else None
        fingerprint = own or wanted.fingerprint
        if fingerprint is not None and not all(0 <= token < config.vocab_size for token in fingerprint.tokens):
            raise Unfit("the fingerprint's prompt has tokens that the model does not know")
        found = Manifest(packed.entries, known.origin if known else None, fingerprint)
        name = f"{_label(wanted, found.origin)}-{found.digest[:8]}"
        version = Version(name, out or Path(), found, base.name if wanted.kind == "adapter" else None)
        if out is not None:
            version.to_file()
    except BaseException:
        if out is not None:
            out.unlink(missing_ok=True)
        raise
    return version


def describe(folder: Path, out: Path, label: str | None = None) -> Version:
    """Pack the weights that a server is about to start from. Raises BadInput: the checkpoint cannot be used."""
    config, checkpoint = open_checkpoint(folder)
    known = manifests.read(folder)
    layout = {
        name: (shape, manifests.DTYPES[checkpoint.read(name, 0, 0, 0).dtype])  # no rows: only the type is wanted
        for name, shape in hf_tensors(config).items()
    }
    packed = pack(checkpoint.tensors(config), layout, out)
    faults = [] if known is None else manifests.differences(packed.entries, known.tensors, digests=True)
    if faults or packed.not_finite:
        out.unlink()
        why = "; ".join(faults) or f"values that are not finite in {', '.join(packed.not_finite[:3])}"
        raise BadInput(f"{folder} is not what was exported there: {why}")
    found = replace(known, tensors=packed.entries) if known else Manifest(packed.entries)
    version = Version(f"{clean(label or _default(folder, found.origin))}-{found.digest[:8]}", out, found)
    version.to_file()
    return version


def _checkpoint(
    folder: Path, model: Path, config: BeamConfig, known: Manifest | None, base: Version
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint of the same architecture, vocabulary, names and shapes as the running model."""
    theirs, checkpoint = open_checkpoint(folder)
    ours, other = _relevant(config), _relevant(theirs)
    differs = sorted(key for key in ours | other if ours.get(key) != other.get(key))
    if differs:
        what = ", ".join(f"{key} is {other.get(key)!r} instead of {ours.get(key)!r}" for key in differs[:3])
        raise Unfit(f"{folder} is another model than the one served: {what}")
    if _vocabulary(folder) not in (None, _vocabulary(model)):
        raise Unfit(f"{folder}: its tokenizer has another vocabulary than the one served")
    if known is not None:
        faults = manifests.differences(known.tensors, base.manifest.tensors, digests=False)
        if faults:
            raise Unfit(f"{folder}: its tensors are not those of the running model: {'; '.join(faults)}")
    return checkpoint.tensors(theirs)


def _relevant(config: BeamConfig) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key not in IRRELEVANT}


def _vocabulary(folder: Path) -> str | None:
    """What maps text to tokens; None where the folder has no tokenizer."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return json.dumps([content["model"], content.get("added_tokens")], sort_keys=True)
    except (ValueError, KeyError, TypeError) as error:
        raise Unfit(f"{path}: not a tokenizer ({error!r})") from error


def _check_order(new: Origin | None, served: Origin | None, allow_older: bool) -> None:
    """Raise Unfit: the weights are from an earlier step of the run than those served."""
    if new is None or served is None or new.run != served.run or allow_older or new.step >= served.step:
        return
    raise Unfit(
        f"step {new.step} of {new.run} is older than step {served.step}, which is served; --allow-older takes it"
    )


def _label(wanted: Wanted, origin: Origin | None) -> str:
    return clean(wanted.label or _default(Path(wanted.weights), origin))


def _default(folder: Path, origin: Origin | None) -> str:
    return folder.resolve().name if origin is None else f"step-{origin.step}"


def clean(label: str) -> str:
    """A label that fits into a header."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", label)[:48] or "weights"
