"""Tile sizes tuned for the 7.2 B Beam on this card: kernel by kernel, and what rollouts gain."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from beam_rl import apart
from beam_rl.rollout.moe_tuning import MoeShape, tune
from tests.gpu.rollout import large, throughput, variants

SECONDS = 60.0


def run(report: Callable[[str, Any], None]) -> None:
    shape = MoeShape.of(large(), 1)
    with tempfile.TemporaryDirectory() as temporary:
        tables = Path(temporary) / "tables"
        file, found = apart.call(tune, shape, tables, SECONDS)
        report("table", file.name)
        for tuned in found:
            took = f"{tuned.default_us:.1f} us by default, {tuned.best_us:.1f} us tuned, {tuned.tried} tried"
            report(f"{tuned.tokens} tokens", took)
        default = variants()["rollout"]
        tuned_too = replace(default, environment=(("VLLM_TUNED_CONFIG_FOLDER", str(tables)),))
        throughput(Path(temporary), report, {"default tiles": default, "tuned tiles": tuned_too})
