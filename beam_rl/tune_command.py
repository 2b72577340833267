"""`beam-rl tune-moe`: a table of tile sizes for vLLM's MoE kernel, for one model's shape on this machine's GPU."""

import argparse

from beam_rl.model.config import load_config
from beam_rl.model.errors import BadInput
from beam_rl.rollout.moe_tuning import MoeShape, Tuned, tune


def run(options: argparse.Namespace) -> int:
    """Tune, write the table, and print what it brings."""
    config = load_config(options.model)
    if options.tensor_parallel < 1 or not options.seconds > 0:
        raise BadInput("--tensor-parallel and --seconds must be positive.")
    try:
        shape = MoeShape.of(config, options.tensor_parallel)
    except ValueError as error:
        raise BadInput(f"--tensor-parallel {options.tensor_parallel}: {error}.") from error
    import torch

    if not torch.cuda.is_available():
        raise BadInput("tune-moe: no CUDA device: the kernel is timed on the GPU that it is tuned for. Run it there.")
    where = f"{shape.experts} experts of {shape.hidden} x {shape.width}, {shape.topk} a token"
    print(f"{torch.cuda.get_device_name()}: {where}", flush=True)
    print(f"{'tokens':>7} {'default':>10} {'tuned':>10}  tried", flush=True)
    file, _ = tune(shape, options.out, options.seconds, _tell)
    print(file)
    return 0


def _tell(tuned: Tuned) -> None:
    gain = tuned.default_us / tuned.best_us - 1
    default, best = f"{tuned.default_us:.1f} us", f"{tuned.best_us:.1f} us"
    print(f"{tuned.tokens:>7,} {default:>10} {best:>10}  {tuned.tried:>5}  {gain:+.0%}", flush=True)
