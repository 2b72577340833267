"""`beam-rl score` and `beam-rl export`: one model in one process, without Ray."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from beam_rl import apart, checkpoints, precision, recipe
from beam_rl.model.errors import BadInput
from beam_rl.terminal import terminal_apart


def score(
    model: Path,
    tokens: Path,
    side: Literal["trainer", "rollout"],
    dtype: Literal["float32", "bfloat16"],
    replay: Path | None,
    out: Path,
) -> None:
    """Write `token_logprobs` [B, S-1] and `routes.L` [B, S, topk] of `input_ids` [B, S] under one side's model.

    Raises BadInput: a file or the model cannot be used.
    """
    if "input_ids" not in read(tokens, "--tokens"):
        raise BadInput(f"--tokens {tokens}: has no tensor input_ids.")
    if not out.absolute().parent.is_dir():
        raise BadInput(f"--out {out}: the folder does not exist.")
    if replay is not None:
        read(replay, "--replay")
    from beam_rl.model.checkpoint import open_checkpoint

    open_checkpoint(model)  # before the side's own imports, which take longer
    partial = out.with_name(f".{out.name}.partial")
    apart.call(write_scores, model, tokens, side, dtype, replay, partial)
    partial.replace(out)


def write_scores(
    model: Path,
    tokens: Path,
    side: Literal["trainer", "rollout"],
    dtype: Literal["float32", "bfloat16"],
    replay: Path | None,
    out: Path,
) -> None:
    """Body of `score`, in a process of its own: what libraries print there is of no interest."""
    if side == "trainer":
        from beam_rl.trainer.score import score as run
    else:
        from beam_rl.rollout.score import score as run
    routes = read(replay, "--replay") if replay is not None else None
    results = run(model, read(tokens, "--tokens")["input_ids"], dtype, routes)
    save_file({name: tensor.contiguous() for name, tensor in results.items()}, out)


def read(path: Path, option: str) -> dict[str, Tensor]:
    """All tensors of a safetensors file. Raises BadInput."""
    if not path.is_file():
        raise BadInput(f"{option} {path}: no such file.")
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise BadInput(f"{option} {path}: not a safetensors file: {error}") from error


def export(run_dir: Path, out: Path | None) -> Path:
    """Write a run's last checkpoint as a Hugging Face checkpoint, by default to `RUN/export`; returns the folder.

    Raises BadInput: the run has no checkpoint.
    """
    found = checkpoints.latest(run_dir / "checkpoints")
    if found is None:
        raise BadInput(f"{run_dir}: has no finished checkpoint to export.")
    loaded = recipe.load(run_dir / "recipe.yaml", run_dir=run_dir)
    if loaded.beam.tiny is not None:
        from beam_rl import tiny

        start = tiny.prepare(loaded, lambda done: None)
    else:
        assert loaded.model_path is not None
        start = loaded.model_path
    folder = out or run_dir / "export"
    with terminal_apart(run_dir / "logs" / "export.log"):
        from beam_rl import fingerprint
        from beam_rl.model.checkpoint import save_hf
        from beam_rl.model.config import load_config
        from beam_rl.rollout.manifest import Origin
        from beam_rl.trainer.engine import TrainerEngine
        from beam_rl.trainer.settings import Parallel
        from beam_rl.trainer.skyrl_settings import engine_config, optimizer_settings

        hf = load_config(start)
        optimizer = optimizer_settings(loaded.trainer, loaded.steps * loaded.updates_per_step)
        config = engine_config(loaded.trainer, optimizer, precision.chosen(loaded), recompute=False)
        engine = TrainerEngine(replace(config, parallel=Parallel()))  # one process reads checkpoints of any layout
        engine.build(hf)
        engine.load_hf(start)  # what an adapter's checkpoint leaves out
        engine.load(checkpoints.folder(run_dir / "checkpoints", found[0]) / "policy")
        save_hf(folder, hf, engine.policy_weights(), copy_from=start)
        fingerprint.write_manifest(folder, engine, Origin(run_dir.resolve().name, found[0]))
    return folder
