"""Both sides against transformers' own Beam, in float32, through `beam-rl score`: `make parity`.

Prints the largest difference of a token's log-prob and the number of token-layers whose experts differ as sets.
"""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden"
COMMAND = Path(sys.executable).with_name("beam-rl")
MODELS = ("tiny", "groups", "long")


def write_model(name: str, folder: Path) -> Path:
    """A reference checkpoint, drawn again from its seed, with reference.safetensors beside it."""
    spec = importlib.util.spec_from_file_location("golden_weights", GOLDEN / "weights.py")
    assert spec is not None
    assert spec.loader is not None
    weights = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(weights)
    return weights.write(name, folder / name)


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[int, int]:
    """(token-layers whose experts differ as sets, token-layers in all)."""
    wrong = total = 0
    for name in (name for name in theirs if name.startswith("routes.")):
        same = (ours[name].sort(-1).values == theirs[name].sort(-1).values).all(-1)
        wrong, total = wrong + int((~same).sum()), total + same.numel()
    return wrong, total


def main() -> None:
    print(f"{'model':<8}{'side':<9}{'largest |difference| of a log-prob':>36}{'experts differ':>20}")
    with tempfile.TemporaryDirectory(prefix="beam-rl-parity-") as temporary:
        for name in MODELS:
            model = write_model(name, Path(temporary))
            reference = load_file(model / "reference.safetensors")
            for side in ("trainer", "rollout"):
                out = Path(temporary) / f"{name}-{side}.safetensors"
                tokens = model / "reference.safetensors"
                subprocess.run([COMMAND, "score", model, "--tokens", tokens, "--side", side, "--out", out], check=True)
                scores = load_file(out)
                difference = (scores["token_logprobs"] - reference["token_logprobs"]).abs().max().item()
                wrong, total = differing(scores, reference)
                print(f"{name:<8}{side:<9}{difference:>36.1e}{f'{wrong} of {total:,}':>20}", flush=True)


if __name__ == "__main__":
    main()
