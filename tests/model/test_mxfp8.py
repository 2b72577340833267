"""The quantiser is torchao's bit for bit, and the emulated GEMMs are torchao's emulated GEMMs."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from beam_rl.model import fused, mxfp8, numerics
from beam_rl.model.mxfp8_config import Mxfp8Settings

to_mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor").to_mx

from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm  # noqa: E402
from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm  # noqa: E402
from torchao.prototype.mx_formats.config import ScaleCalculationMode  # noqa: E402
from torchao.prototype.mx_formats.mx_tensor import MXTensor  # noqa: E402
from torchao.quantization.quantize_.common import KernelPreference  # noqa: E402

scalings = pytest.mark.parametrize("scaling", ["rceil", "floor"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])

TINY, HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spread(*shape: int) -> Tensor:
    """Blocks of very different magnitudes, over the whole range of float32."""
    magnitude = torch.rand(*shape[:-1], shape[-1] // 32, 1, generator=torch.Generator().manual_seed(1))
    return (normal(*shape).unflatten(-1, (-1, 32)) * torch.exp2(magnitude * 240 - 125)).flatten(-2)


def around(values: list[float]) -> Tensor:
    """Blocks whose largest value is one of the values, or a few float32 steps beside it, of either sign."""
    centres = torch.tensor(values)
    bits = centres.view(torch.int32)[:, None] + torch.arange(-4, 5)
    largest = torch.cat((bits.view(torch.float32).flatten(), -bits.view(torch.float32).flatten()))
    blocks = normal(len(largest), 32).clamp(-1, 1) * 0.99 * largest[:, None]
    blocks[:, 7] = largest
    return blocks


def with_special(value: float, place: int) -> Tensor:
    blocks = normal(6, 64)
    blocks[1::2, place] = value
    return blocks


INPUTS: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: normal(300, 96),
    "all magnitudes": lambda: spread(200, 160),
    "zeros": lambda: torch.zeros(3, 64),
    "minus zeros": lambda: -torch.zeros(3, 64),
    "denormals": lambda: normal(50, 64) * TINY * 2.0**-3,
    "smallest denormals": lambda: torch.full((2, 32), 1e-45),
    "smallest scale": lambda: around([448 * 2.0**-127, 448 * 2.0**-126, 2.0**-119, 2.0**-118, 2.0**-117]),
    "powers of two": lambda: around([2.0**e for e in range(-120, 127, 3)]),
    "largest of E4M3": lambda: around([448 * 2.0**e for e in range(-117, 119, 3)]),
    "next to infinity": lambda: around([HUGE / 2, 3e38]),
    "largest float": lambda: torch.full((2, 32), HUGE),
    "infinity": lambda: with_special(math.inf, 40),
    "minus infinity": lambda: with_special(-math.inf, 3),
    "NaN": lambda: with_special(math.nan, 63),
    "NaN and infinity": lambda: torch.where(torch.arange(64) == 5, math.nan, with_special(math.inf, 9)),
    "ties": lambda: (torch.arange(0, 512).float() / 16).view(-1, 32),
    "one row": lambda: normal(1, 32),
    "one dimension": lambda: normal(96),
    "three dimensions": lambda: normal(5, 7, 64),
    "no rows": lambda: normal(0, 64),
}
every_input = pytest.mark.parametrize("x", [pytest.param(make(), id=name) for name, make in INPUTS.items()])


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@every_input
@dtypes
@scalings
def test_data_and_scales_are_torchaos_bit_for_bit(scaling: str, dtype: torch.dtype, x: Tensor) -> None:
    x = x.to(dtype)
    data, scale = mxfp8.quantize(x, scaling)
    expected_scale, expected_data = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode(scaling))
    assert data.dtype == expected_data.dtype
    assert scale.dtype == expected_scale.dtype
    assert scale.shape == expected_scale.shape
    assert torch.equal(bits(scale), bits(expected_scale))
    assert torch.equal(bits(data), bits(expected_data))


@pytest.mark.parametrize("width", [1, 31, 33, 100])
@scalings
def test_rows_that_end_inside_a_block_are_quantised_as_if_zeros_followed(scaling: str, width: int) -> None:
    x = normal(17, width)
    data, scale = mxfp8.quantize(x, scaling)
    padded = torch.nn.functional.pad(x, [0, -width % 32])
    expected_scale, expected_data = to_mx(padded, torch.float8_e4m3fn, 32, ScaleCalculationMode(scaling))
    assert torch.equal(bits(data), bits(expected_data[:, :width]))
    assert torch.equal(bits(scale), bits(expected_scale))
    assert torch.equal(mxfp8.dequantize(data, scale, x.dtype), mxfp8.round_trip(x, scaling))


@every_input
@dtypes
@scalings
def test_the_round_trip_is_torchaos_dequantisation(scaling: str, dtype: torch.dtype, x: Tensor) -> None:
    x = x.to(dtype)
    mx = MXTensor.to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode(scaling))
    expected = mx.dequantize(torch.float32)
    data, scale = mxfp8.quantize(x, scaling)
    assert_same(mxfp8.dequantize(data, scale, torch.float32), expected)
    assert_same(mxfp8.round_trip(x, scaling, dtype=torch.float32), expected)


def assert_same(x: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)


@scalings
def test_quantised_values_are_exact_in_bfloat16_and_quantise_to_themselves(scaling: str) -> None:
    """So the rollout may load weights that were quantised once, and quantise them again."""
    x = spread(200, 160)
    once = mxfp8.round_trip(x, scaling)
    kept = x.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, -1) > 1e-30
    assert torch.equal(once.bfloat16().float()[kept], once[kept])
    assert torch.equal(mxfp8.round_trip(once.bfloat16(), scaling).float()[kept], once[kept])


@scalings
def test_blocks_along_another_dimension_are_those_of_the_transposed(scaling: str) -> None:
    x = normal(3, 70, 40)
    expected = mxfp8.round_trip(x.transpose(1, 2).contiguous(), scaling).transpose(1, 2)
    assert torch.equal(mxfp8.round_trip(x, scaling, 1), expected)


def test_fused_projections_quantise_as_their_parts() -> None:
    """Blocks lie along `in`, so rows of q, gate, k and v may lie in any order in one weight."""
    parts = [normal(32 * rows, 96, seed=rows) for rows in (1, 2, 3)]
    whole = mxfp8.round_trip(torch.cat(parts), "rceil")
    assert torch.equal(whole, torch.cat([mxfp8.round_trip(part, "rceil") for part in parts]))


def run(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Output and gradients of the inputs, for one gradient of the output."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    out = function(*inputs)
    return [out, *torch.autograd.grad(out, inputs, normal(*out.shape, seed=9).to(out.dtype))]


@scalings
def test_linear_and_its_gradients_are_torchaos_emulation(scaling: str) -> None:
    """In bfloat16 both round the outputs of all three GEMMs once; the sums before are float32, in another order."""
    x, weight = normal(2, 32, 96).bfloat16(), normal(64, 96, seed=1).bfloat16()
    mode = ScaleCalculationMode(scaling)
    ours = run(lambda x, w: mxfp8.linear(x, w, Mxfp8Settings(scaling)), x, weight)
    theirs = run(lambda x, w: _to_mxfp8_then_scaled_mm(x, w, KernelPreference.EMULATED, mode), x, weight)
    for name, found, expected in zip(("output", "x", "weight"), ours, theirs, strict=True):
        assert found.dtype == torch.bfloat16, name
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-2, msg=lambda m, n=name: f"{n}: {m}")


@scalings
def test_grouped_linear_and_its_gradients_are_torchaos_emulation(scaling: str) -> None:
    """torchao rounds outputs to bfloat16; on the CPU ours stay float32, as those of the unquantised experts do."""
    ends = torch.tensor([5, 5, 50, 97], dtype=torch.int32)  # the second expert has no rows
    x, weight = normal(97, 64).bfloat16(), normal(4, 32, 64, seed=1).bfloat16()

    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        return _to_mxfp8_then_scaled_grouped_mm(
            x,
            weight.transpose(1, 2),
            ends,
            kernel_preference=KernelPreference.EMULATED,
            scale_calculation_mode=ScaleCalculationMode(scaling),
            pad_token_groups_for_grouped_mm=True,
        )

    ours = run(lambda x, w: mxfp8.grouped_linear(x, w, ends, Mxfp8Settings(scaling)).bfloat16(), x, weight)
    for name, found, expected in zip(("output", "x", "weight"), ours, run(theirs, x, weight), strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-2, msg=lambda m, n=name: f"{n}: {m}")


def test_gradients_are_those_of_the_plain_linear_up_to_quantisation() -> None:
    x, weight = normal(70, 64), normal(96, 64, seed=1)
    ours = run(lambda x, w: mxfp8.linear(x, w, Mxfp8Settings()), x, weight)
    for found, expected in zip(ours, run(torch.nn.functional.linear, x, weight), strict=True):
        assert 0.005 < float((found - expected).norm() / expected.norm()) < 0.05


def test_token_blocks_never_join_rows_of_two_experts() -> None:
    """A large row of one expert must not cost the next expert's gradient its precision."""
    x, weight = normal(40, 32), normal(2, 32, 32, seed=1)
    x[:20] *= 1e4
    ends = torch.tensor([20, 40], dtype=torch.int32)
    both = run(lambda x, w: mxfp8.grouped_linear(x, w, ends, Mxfp8Settings()), x, weight)[2]
    alone = torch.tensor([0, 20], dtype=torch.int32)
    grad = normal(40, 32, seed=9)[20:]
    second = weight.clone().requires_grad_()
    (mxfp8.grouped_linear(x[20:], second, alone, Mxfp8Settings()) * grad).sum().backward()
    assert second.grad is not None
    torch.testing.assert_close(both[1], second.grad[1])


def test_frozen_weights_get_no_gradient_and_cost_none() -> None:
    x, weight = normal(8, 32).requires_grad_(), normal(4, 32)
    mxfp8.linear(x, weight, Mxfp8Settings()).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_experts_quantise_what_their_settings_say() -> None:
    x, gate_up, down = normal(24, 64), normal(3, 64, 64, seed=1), normal(3, 64, 32, seed=2)
    ends = torch.tensor([4, 10, 24], dtype=torch.int32)
    on, q = Mxfp8Settings(), lambda value: mxfp8.round_trip(value, "rceil")
    for settings in ((None, None), (on, None), (None, on), (on, on)):
        first, second = (q if each else lambda value: value for each in settings)
        gate, up = numerics.expert_linear(first(x), first(gate_up), ends).chunk(2, -1)
        expected = numerics.expert_linear(second(numerics.swiglu(gate, up)), second(down), ends)
        torch.testing.assert_close(fused.experts_mlp(x, gate_up, down, ends, settings), expected)


WEIGHTS = Mxfp8Settings(activations=False)


@dtypes
@scalings
def test_with_weights_only_nothing_but_the_weight_is_rounded(scaling: str, dtype: torch.dtype) -> None:
    """x's gradient comes through the forward pass's rounded weight, and the weight's own as if it were not rounded."""
    x, weight = normal(2, 35, 96).to(dtype), normal(64, 96, seed=1).to(dtype)
    settings = Mxfp8Settings(scaling, activations=False)
    found = run(lambda x, w: mxfp8.linear(x, w, settings), x, weight)
    exact, grad = mxfp8.round_trip(weight, scaling).double(), normal(2, 35, 64, seed=9).to(dtype).double()
    expected = (x.double() @ exact.t(), grad @ exact, grad.flatten(0, 1).t() @ x.double().flatten(0, 1))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert_rounded_once(ours, theirs)


@dtypes
@scalings
def test_with_weights_only_experts_multiply_with_rounded_weights(scaling: str, dtype: torch.dtype) -> None:
    ends = torch.tensor([5, 5, 50, 97], dtype=torch.int32)  # the second expert has no rows
    x, weight = normal(97, 64).to(dtype), normal(4, 32, 64, seed=1).to(dtype)
    settings = Mxfp8Settings(scaling, activations=False)
    out, x_grad, weight_grad = run(lambda x, w: mxfp8.grouped_linear(x, w, ends, settings), x, weight)
    assert (out.dtype, x_grad.dtype, weight_grad.dtype) == (torch.float32, dtype, dtype)
    exact, grad = mxfp8.round_trip(weight, scaling).double(), normal(97, 32, seed=9).double()
    for expert, rows in enumerate((slice(0, 5), slice(5, 5), slice(5, 50), slice(50, 97))):
        assert_rounded_once(out[rows], x[rows].double() @ exact[expert].t())
        assert_rounded_once(x_grad[rows], grad[rows] @ exact[expert])
        assert_rounded_once(weight_grad[expert], grad[rows].t() @ x[rows].double())


def assert_rounded_once(x: Tensor, exact: Tensor) -> None:
    """x is what a GEMM with float32 sums and one rounding to its type gives."""
    torch.testing.assert_close(x.double(), exact, rtol=0.502 * torch.finfo(x.dtype).eps, atol=2e-5)


def test_with_weights_only_the_plain_linear_of_rounded_weights_is_the_same_bit_for_bit() -> None:
    """What the rollout computes: its weights were rounded before they came."""
    x, weight = normal(40, 1, 96).bfloat16(), normal(64, 96, seed=1).bfloat16()
    ends, experts = torch.tensor([5, 5, 40], dtype=torch.int32), normal(3, 64, 96, seed=2).bfloat16()
    sent = {
        "model.layers.0.self_attn.q_proj.weight": weight,
        "model.layers.1.mlp.experts.0.up_proj.weight": experts,
        "model.norm.weight": x[0, 0],
    }
    q, up, norm = dict(mxfp8.round_covered(sent.items(), WEIGHTS)).values()
    assert (q.dtype, up.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(norm, x[0, 0])
    assert torch.equal(mxfp8.linear(x, weight, WEIGHTS), x @ q.t())
    assert torch.equal(mxfp8.linear(x, q, WEIGHTS), x @ q.t()), "rounding again changes nothing"
    found = mxfp8.grouped_linear(x[:, 0], experts, ends, WEIGHTS)
    assert torch.equal(found, numerics.expert_linear(x[:, 0], up, ends))


@scalings
@pytest.mark.parametrize("exclude", [(), ("down_proj",), ("mlp.experts",)])
@pytest.mark.parametrize("send", [mxfp8.pack, mxfp8.round_covered])
def test_a_stack_of_experts_is_quantised_as_the_experts(send: Callable, exclude: tuple[str, ...], scaling: str) -> None:
    experts = "model.layers.1.mlp.experts"
    stacks = {"gate_up": normal(3, 64, 96).bfloat16(), "down": normal(3, 96, 32, seed=1).bfloat16()}
    settings = Mxfp8Settings(scaling, exclude)
    found = dict(send([(f"{experts}.{kind}_proj", stack) for kind, stack in stacks.items()], settings))
    for kind, stack in stacks.items():
        projection = "gate" if kind == "gate_up" else kind
        apart = [dict(send([(f"{experts}.{e}.{projection}_proj.weight", x)], settings)) for e, x in enumerate(stack)]
        for number, parts in enumerate(zip(*(each.values() for each in apart), strict=True)):
            whole = found.pop(f"{experts}.{kind}_proj{mxfp8.SCALE_SUFFIX if number else ''}")
            assert whole.dtype == parts[0].dtype
            assert torch.equal(bits(whole), torch.stack([bits(part) for part in parts]))
    assert not found


def test_with_weights_only_the_rounded_weight_is_not_kept_for_the_backward_pass() -> None:
    kept: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        kept.add(tensor.data_ptr())
        return tensor

    x, weight = normal(8, 64).requires_grad_(), normal(32, 64, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mxfp8.linear(x, weight, WEIGHTS)
    assert kept == {x.data_ptr(), weight.data_ptr()}
