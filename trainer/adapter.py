"""Adapters on disk, in the format that PEFT loads on transformers' own Beam.

Transformers fuses a layer's experts into the parameters `mlp.experts.gate_up_proj` [experts, 2 * width, hidden] and
`mlp.experts.down_proj`, and PEFT puts adapters of parameters (`target_parameters`) around the module that holds them,
one inside the other: the innermost, gate_up_proj's, is called `base_layer`. So a layer's experts are two pairs on disk:

| tensor below `base_model.model.model.layers.N.mlp.experts` | shape | holds |
|---|---|---|
| `lora_A.weight`, `lora_B.weight` | [experts * r, width], [hidden, r * experts] | down_proj |
| `base_layer.lora_A.weight` | [experts * 2r, hidden] | each expert's gate A above its up A |
| `base_layer.lora_B.weight` | [2 * width, 2r * experts] | each expert's gate B and up B, block-diagonal |

B's columns count experts fastest, A's rows count them slowest. The fused pair has twice the rank and, for the same
scale, more alpha: `rank_pattern`, `alpha_pattern`. Everything else has a pair a projection under its plain name. The
gate, up and down projections of attention and dense layers are targets by parameter, too, because PEFT takes these
names in `target_modules` for the experts'. PEFT has no dropout for parameters, so the file says 0, which only
training would notice.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from beam_rl.model.errors import BadInput
from beam_rl.model.lora import pairs
from beam_rl.model.lora_config import LoraConfig
from beam_rl.model.names import adapter_matrices, hf_tensors

if TYPE_CHECKING:
    from beam_rl.model.config import BeamConfig
    from beam_rl.trainer.engine import TrainerEngine

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_BY_MODULE = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Projections that PEFT finds by module name; the others are targets by parameter."""
_FUSED = "mlp.experts.gate_up_proj"


def save(engine: TrainerEngine, path: Path, base: str | Path | None) -> None:
    """Write the engine's adapters as the folder `path`, on the first rank, complete or not at all."""
    lora = _settings(engine)
    first = dist.get_rank() == 0
    matrices = {}
    for module, matrix, tensor in adapter_matrices(engine.models):
        if first:
            matrices[module, matrix] = tensor.to("cpu", copy=True)
    if first:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as temporary:
            folder = Path(temporary) / "new"
            folder.mkdir()
            config = peft_config(lora, engine.hf, base)
            (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            save_file(dict(_file_tensors(matrices)), folder / WEIGHTS, metadata={"format": "pt"})
            if path.exists():
                path.rename(Path(temporary) / "old")
            folder.rename(path)
    dist.barrier()


def load(engine: TrainerEngine, path: Path) -> None:
    """Give the engine's adapters the values in the folder `path`.

    Raises:
        BadInput: naming the file, and the setting or the first few tensors that differ.
    """
    lora = _settings(engine)
    _check_config(path, lora)
    try:
        file = safe_open(path / WEIGHTS, framework="pt")
    except Exception as error:  # safetensors' own error type, and OSError
        raise BadInput(f"{path / WEIGHTS}: not a readable safetensors file ({error})") from error
    with file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        _check_tensors(path, found, _expected(lora, engine.hf))
        for pair in (pair for model in engine.models for pair in pairs(model)):
            for matrix in ("lora_A", "lora_B"):
                pair.load(matrix, _module_matrix(file, pair.name, matrix, lora, engine.hf.num_experts))
    if engine.config.optimizer is not None:
        engine.optimizer.reload_model_params()


def peft_config(lora: LoraConfig, model: BeamConfig, base: str | Path | None) -> dict[str, Any]:
    """Contents of adapter_config.json: the fields of PEFT's `LoraConfig` that are not at their defaults."""
    held = _held(lora, model)
    by_module = [name for name in _BY_MODULE if f"self_attn.{name}" in held]
    parameters = [f"{name}.weight" for name in held if not name.endswith(_BY_MODULE) and ".experts." not in name]
    together = _together(lora)
    if together and "mlp.experts" in {name.rpartition(".")[0] for name in held}:
        parameters.append(_FUSED)
    if "mlp.experts.down_proj" in held:
        parameters.append("mlp.experts.down_proj")
    fused = len(together) == 2 and _FUSED in parameters
    alpha = lora.lora_alpha * (math.sqrt(2) if lora.use_rslora else 2)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "inference_mode": True,
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": 0.0 if parameters else lora.lora_dropout,
        "use_rslora": lora.use_rslora,
        "init_lora_weights": lora.init_lora_weights,
        "bias": "none",
        "target_modules": by_module,
        "target_parameters": parameters or None,
        "rank_pattern": {_FUSED: 2 * lora.r} if fused else {},
        "alpha_pattern": {_FUSED: alpha} if fused else {},
    }


def _settings(engine: TrainerEngine) -> LoraConfig:
    if engine.config.lora is None:
        raise RuntimeError("this engine was built without LoRA and has no adapters")
    return engine.config.lora


def _held(lora: LoraConfig, model: BeamConfig) -> list[str]:
    """The targeted projections that the model has."""
    names = {_projection(name) for name in hf_tensors(model) if name.startswith("model.layers.")}
    return [projection for projection in lora.projections if projection in names]


def _projection(name: str) -> str:
    """ "mlp.experts.up_proj" of "model.layers.3.mlp.experts.7.up_proj.weight"."""
    return ".".join(part for part in name.removesuffix(".weight").split(".")[3:] if not part.isdigit())


def _together(lora: LoraConfig) -> list[str]:
    """The experts' projections with an adapter in transformers' gate_up_proj."""
    return [name for name in ("gate_proj", "up_proj") if f"mlp.experts.{name}" in lora.projections]


def _file_tensors(matrices: Mapping[tuple[str, str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The matrices (experts' stacked, by module and "lora_A" or "lora_B") as the file has them."""
    layers = dict.fromkeys(module.rpartition(".")[0] for module, _ in matrices if ".experts." in module)
    for (module, matrix), tensor in matrices.items():
        if ".experts." not in module:
            yield f"{_PREFIX}{module}.{matrix}.weight", tensor
    for experts in layers:
        has_down = (f"{experts}.down_proj", "lora_A") in matrices
        names = [name for name in ("gate_proj", "up_proj") if (f"{experts}.{name}", "lora_A") in matrices]
        if has_down:
            a, b = (matrices[f"{experts}.down_proj", matrix] for matrix in ("lora_A", "lora_B"))
            yield from _flat(experts, a, b)
        if names:
            a = torch.cat([matrices[f"{experts}.{name}", "lora_A"] for name in names], dim=1)  # [E, names * r, hidden]
            parts = [matrices[f"{experts}.{name}", "lora_B"] for name in names]
            count, width, r = parts[0].shape
            b = parts[0].new_zeros(count, 2, width, len(names), r)
            for column, (name, part) in enumerate(zip(names, parts, strict=True)):
                b[:, int(name == "up_proj"), :, column] = part
            yield from _flat(experts + (".base_layer" if has_down else ""), a, b.view(count, 2 * width, -1))


def _flat(module: str, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A [experts, r, in] and B [experts, out, r] as PEFT's two matrices."""
    yield f"{_PREFIX}{module}.lora_A.weight", a.flatten(0, 1).contiguous()
    yield f"{_PREFIX}{module}.lora_B.weight", b.permute(1, 2, 0).flatten(1).contiguous()


def _module_matrix(file: Any, module: str, matrix: str, lora: LoraConfig, experts: int) -> Tensor:
    """One matrix of a module, [experts, …] of an experts' projection, from the file: what `_file_tensors` undoes."""
    block, _, projection = module.rpartition(".")
    if not block.endswith(".experts"):
        return file.get_tensor(f"{_PREFIX}{module}.{matrix}.weight")
    names = ["down_proj"] if projection == "down_proj" else _together(lora)
    inner = ".base_layer" if projection != "down_proj" and "mlp.experts.down_proj" in lora.projections else ""
    flat = file.get_tensor(f"{_PREFIX}{block}{inner}.{matrix}.weight")
    place = names.index(projection)
    if matrix == "lora_A":
        return flat.view(experts, len(names), lora.r, -1)[:, place]
    stacked = flat.view(flat.shape[0], len(names), lora.r, experts)[:, place].permute(2, 0, 1)  # [experts, out, r]
    return stacked if projection == "down_proj" else stacked.chunk(2, dim=1)[int(projection == "up_proj")]


def _expected(lora: LoraConfig, model: BeamConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the file's tensors."""
    matrices: dict[tuple[str, str], Tensor] = {}
    for name, shape in hf_tensors(model).items():
        if not name.startswith("model.layers.") or _projection(name) not in lora.projections:
            continue
        module = name.removesuffix(".weight")
        experts: tuple[int, ...] = ()
        if ".experts." in module:
            head, _, tail = module.partition(".experts.")
            module, experts = f"{head}.experts.{tail.partition('.')[2]}", (model.num_experts,)
        matrices[module, "lora_A"] = torch.empty(*experts, lora.r, shape[1], device="meta")
        matrices[module, "lora_B"] = torch.empty(*experts, shape[0], lora.r, device="meta")
    return {name: tuple(tensor.shape) for name, tensor in _file_tensors(matrices)}


def _check_config(path: Path, lora: LoraConfig) -> None:
    file = path / CONFIG
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{file}: no readable adapter settings ({error}); give a folder with a PEFT adapter") from error
    for name in ("r", "lora_alpha", "use_rslora"):
        if found.get(name) != getattr(lora, name):
            raise BadInput(
                f"{file} has {name} = {found.get(name)!r}, this run has lora.{name} = {getattr(lora, name)!r}:"
                " adapters are continued with the settings that they were made with"
            )


def _check_tensors(path: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    wrong = [
        f"{name} has shape {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    faults = [
        ("missing", [name for name in expected if name not in found]),
        ("unexpected", [name for name in found if name not in expected]),
        ("wrongly shaped", wrong),
    ]
    text = "; ".join(f"{len(names)} {kind}: {', '.join(names[:3])}" for kind, names in faults if names)
    if text:
        raise BadInput(
            f"{path / WEIGHTS} was made with other lora.target_modules or for another model than this run's: {text}"
        )
