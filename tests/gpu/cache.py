"""What rollouts by vLLM gain, in tokens/s, from one pool of KV blocks for all windows, and from an 8-bit KV cache."""

import tempfile
from pathlib import Path

from tests.gpu.checks import Checks
from tests.gpu.engines import Tell
from tests.gpu.rollout import REPETITIONS, rollout, throughput


def run(report: Tell) -> None:
    checks = Checks()
    with tempfile.TemporaryDirectory() as temporary, checks.attempt("throughput"):
        engines = {
            "several pools": rollout(disable_hybrid_kv_cache_manager=False),
            "one pool": rollout(),
            "one pool, fp8 KV": rollout(kv_cache_dtype="fp8"),
        }
        throughput(Path(temporary), report, engines, REPETITIONS, checks)
    checks.done()
