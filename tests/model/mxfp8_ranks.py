"""Run by `test_mxfp8_ranks.py` in two processes: tensor-parallel linears in MXFP8 against the whole product."""

from types import SimpleNamespace

import torch

from beam_rl.trainer import cpu

cpu.install()  # before Megatron is imported

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from beam_rl.model import mxfp8  # noqa: E402
from beam_rl.model.config import BeamConfig  # noqa: E402
from beam_rl.model.linear import BeamColumnParallelLinear, BeamRowParallelLinear  # noqa: E402
from beam_rl.model.mxfp8_config import Mxfp8Settings  # noqa: E402
from beam_rl.model.transformer_config import transformer_config  # noqa: E402
from beam_rl.trainer import distributed  # noqa: E402
from beam_rl.trainer.settings import Parallel  # noqa: E402

TOKENS, NARROW, WIDE = 64, 64, 128


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check(settings: Mxfp8Settings, sequence_parallel: bool) -> None:
    """Output and gradients of a column- and a row-parallel linear."""
    distributed.initialize(Parallel(tp=2), seed=0)
    rank, group = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_group()
    hf = BeamConfig(vocab_size=64, hidden_size=NARROW, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    with cpu.cuda_as_cpu():
        config = transformer_config(hf, params_dtype=torch.float32, tp=2, sequence_parallel=sequence_parallel)
    options = {
        "config": config,
        "bias": False,
        "skip_bias_add": False,
        "tp_group": group,
        "init_method": torch.nn.init.zeros_,
    }
    for kind in ("column", "row"):
        column = kind == "column"
        width, out = (NARROW, WIDE) if column else (WIDE, NARROW)
        x, weight = normal(TOKENS, 1, width, seed=1).requires_grad_(), normal(out, width, seed=2).requires_grad_()
        expected, grad = mxfp8.linear(x, weight, settings), normal(TOKENS, 1, out, seed=3)
        expected.backward(grad)
        with cpu.cuda_as_cpu():
            if column:
                layer = BeamColumnParallelLinear(width, out, gather_output=False, **options)
            else:
                layer = BeamRowParallelLinear(width, out, input_is_parallel=True, **options)
        layer.mxfp8 = settings
        whole = SimpleNamespace(x=x.detach(), out=expected.detach(), grad=grad, x_grad=x.grad, weight_grad=weight.grad)
        # Which dimension of the input and of the output the ranks split, if any.
        tokens = 0 if sequence_parallel else None
        into, outof = (tokens, 2) if column else (2, tokens)
        layer.weight.data.copy_(weight.detach().chunk(2, 0 if column else 1)[rank])
        mine = part(whole.x, into, rank).clone().requires_grad_()
        with cpu.cuda_as_cpu():
            found, _ = layer(mine)
            found.backward(part(whole.grad, outof, rank))
        name = f"{kind}, activations={settings.activations}, sequence_parallel={sequence_parallel}"
        for what, actual, wanted in (
            ("output", found, part(whole.out, outof, rank)),
            ("input's gradient", mine.grad, part(whole.x_grad, into, rank)),
            ("weight's gradient", layer.weight.grad, whole.weight_grad.chunk(2, 0 if column else 1)[rank]),
        ):
            torch.testing.assert_close(
                actual, wanted, rtol=1e-5, atol=1e-4, msg=lambda m, n=name, w=what: f"{n}, {w}: {m}"
            )
    parallel_state.destroy_model_parallel()


def part(x: torch.Tensor, dim: int | None, rank: int) -> torch.Tensor:
    return x if dim is None else x.chunk(2, dim)[rank].contiguous()


if __name__ == "__main__":
    for activations in (True, False):
        for each in (True, False):
            check(Mxfp8Settings(activations=activations), each)
    dist.destroy_process_group()
