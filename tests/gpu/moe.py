"""Tile sizes tuned for the 7.2 B Beam on this card: kernel by kernel, and what rollouts gain."""

import tempfile
from dataclasses import replace
from pathlib import Path

from beam_rl.rollout.moe_tuning import MoeShape, Tuned, tune
from tests.gpu.checks import Checks
from tests.gpu.engines import Tell, streamed
from tests.gpu.models import large
from tests.gpu.rollout import rollout, throughput

SECONDS = 30.0
TOKENS = (1, 8, 64, 256, 2048)
REPETITIONS = 3


def run(report: Tell) -> None:
    checks = Checks()
    with tempfile.TemporaryDirectory() as temporary:
        folder, tables = Path(temporary), Path(temporary) / "tables"
        failed = streamed(search, (tables,), report, folder)
        checks.expect(failed is None, str(failed))
        if failed is None:
            default = rollout()
            tuned = replace(default, environment=(("VLLM_TUNED_CONFIG_FOLDER", str(tables)),))
            throughput(folder, report, {"default tiles": default, "tuned tiles": tuned}, REPETITIONS, checks)
    checks.done()


def search(tell: Tell, tables: Path) -> None:
    """Write a table."""

    def report(tuned: Tuned) -> None:
        took = f"{tuned.default_us:.1f} us by default, {tuned.best_us:.1f} us tuned, {tuned.tried} tried"
        tell(f"{tuned.tokens} tokens", took)

    file, _ = tune(MoeShape.of(large(), 1), tables, SECONDS, report, TOKENS)
    tell("table", file.name)
