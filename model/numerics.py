"""The one definition of Beam's arithmetic, with the reference implementation's rounding points.

The Megatron modules (trainer) and the portable vLLM model (rollout) both call these functions, so that the two sides
agree by construction. Tensors called x are bfloat16 or float32; every function computes in float32 where the reference
does (transformers' `BeamForCausalLM`) and rounds to x's dtype exactly where the reference rounds. GPU kernels are
faster versions of these functions and are tested against them.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SSMAX_LENGTH = 2048
"""Position, in tokens, at which SSMax begins to sharpen the attention of layers without RoPE."""
SSMAX_EXPONENT = 0.1


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension: float32 throughout, the weight included, then one rounding to x's dtype."""
    return rescale(x, weight, inverse_rms(x, eps))


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean of squares + eps) over the last dimension, which stays with size 1; float32."""
    norm = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True)  # one pass over memory instead of three
    return torch.rsqrt(norm.square() / x.shape[-1] + eps)


def rescale(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """weight * (x * scale) in float32, rounded to x's dtype."""
    return (weight * (x.float() * scale)).to(x.dtype)


def rope_inverse_frequencies(head_dim: int, theta: float, device: torch.device | str | None = None) -> Tensor:
    """Inverse frequencies of rotary embedding, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return 1.0 / (theta**exponents)


def rope_cos_sin(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [tokens, 1, head_dim / 2] each, of the rotations at positions [tokens]."""
    angles = (positions.float()[:, None] * inv_freq)[:, None, :]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [tokens, heads, head_dim] in float32, pairing element i with i + head_dim / 2; one rounding."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def ssmax_scale(positions: Tensor) -> Tensor:
    """Scalable-softmax factor of the query at each position, float32 [tokens]: ((p + 1) / 2048 + 1) ^ 0.1."""
    return torch.exp(SSMAX_EXPONENT * torch.log1p((positions.float() + 1) / SSMAX_LENGTH))


def apply_ssmax(q: Tensor, positions: Tensor) -> Tensor:
    """Queries [tokens, heads, head_dim] of a layer without RoPE, scaled in float32, one rounding."""
    return stretch(q, ssmax_scale(positions))


def stretch(q: Tensor, scale: Tensor) -> Tensor:
    """Queries [tokens, heads, head_dim] times scale float32 [tokens], one rounding."""
    return (q.float() * scale[:, None, None]).to(q.dtype)


def output_gate(attention: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """Gate the attention output. attention and gate [..., heads, head_dim], bias [heads] (one a head).

    Rounds after the bias, after the sigmoid and after the product.
    """
    return attention * torch.sigmoid(gate + bias[:, None])


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU, activation and product in float32, one rounding."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def depth_scales(n: int) -> tuple[float, float]:
    """Factors (branch, residual) of the n-th residual addition (1 is the embedding): 1/sqrt(n) and sqrt((n-1)/n).

    Layer l, counted from 0, adds its attention at n = 2 (l + 1) and its MLP at n + 1.
    """
    return 1.0 / math.sqrt(n), math.sqrt((n - 1) / n)


def depth_residual(branch: Tensor, residual: Tensor, n: int) -> Tensor:
    """The n-th depth-scaled residual addition; both products round to x's dtype, and so does the sum."""
    branch_scale, residual_scale = depth_scales(n)
    return branch * branch_scale + residual * residual_scale


def softcap(logits: Tensor, cap: float | None) -> Tensor:
    """Logits in float32, squashed into (-cap, cap) by tanh; None leaves them as they are."""
    logits = logits.float()
    return logits if cap is None else torch.tanh(logits / cap) * cap


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Router logits, float32 [tokens, experts], of x [tokens, hidden] by weight float32 [experts, hidden]."""
    return F.linear(x.float(), weight.float())


def route(
    logits: Tensor, bias: Tensor, topk: int, n_group: int, topk_group: int, normalise: bool = True
) -> tuple[Tensor, Tensor]:
    """Choose experts: sigmoid scores, group-limited, with a correction bias that moves the choice but not the weight.

    Args:
        logits: float32 [tokens, experts].
        bias: float32 [experts], the correction bias.
        topk: experts a token uses.
        n_group: groups of consecutive experts; a group's score is the sum of its best two.
        topk_group: groups a token may use.
        normalise: divide the weights by their sum.

    Returns:
        weights float32 [tokens, topk], before the routed scaling factor, and ids int64 [tokens, topk].
    """
    tokens, experts = logits.shape
    choice = logits.detach().sigmoid() + bias
    grouped = choice.view(tokens, n_group, experts // n_group)
    group_scores = grouped.topk(2, dim=-1).values.sum(-1)
    best_groups = group_scores.topk(topk_group, dim=-1).indices
    barred = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best_groups, False)
    choice = grouped.masked_fill(barred[:, :, None], float("-inf")).view(tokens, experts)
    ids = choice.topk(topk, dim=-1).indices
    return route_weights(logits, ids, normalise), ids


def route_weights(logits: Tensor, ids: Tensor, normalise: bool = True) -> Tensor:
    """Weights, float32 [tokens, topk], that the router gives to the experts ids [tokens, topk], whoever chose them."""
    weights = logits.sigmoid().gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) if normalise else weights


def expert_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Linear map of rows by their experts' matrices: grouped GEMM with float32 accumulation.

    On a CPU the result is float32, as in vLLM's CPU expert kernel, which rounds only after SwiGLU and after the
    weighted sum (PyTorch's grouped GEMM is no slower in float32 there). On a GPU it is rounded to x's dtype.

    Args:
        x: [rows, in], sorted by expert.
        weight: [experts, out, in].
        ends: int32 [experts], the row after each expert's last.
    """
    if x.device.type == "cpu":
        x, weight = x.float(), weight.float()
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


def experts_mlp(x: Tensor, gate_up: Tensor, down: Tensor, ends: Tensor) -> Tensor:
    """SwiGLU MLPs of rows x [rows, hidden] sorted by expert; SwiGLU's output is rounded to x's dtype.

    Args:
        gate_up: [experts, 2 * intermediate, hidden], gate above up.
        down: [experts, hidden, intermediate].
        ends: int32 [experts], the row after each expert's last.

    Returns:
        [rows, hidden], rounded as `expert_linear` does.
    """
    gate, up = expert_linear(x, gate_up, ends).chunk(2, dim=-1)
    return expert_linear(swiglu(gate, up).to(x.dtype), down, ends)


def combine_experts(outputs: Tensor, weights: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """Weighted sum of the chosen experts' outputs: float32 throughout, then one rounding to dtype.

    Args:
        outputs: [tokens, topk, hidden].
        weights: float32 [tokens, topk].
        scaling: the routed scaling factor, applied to the sum.
    """
    total = torch.bmm(weights[:, None, :], outputs.float())[:, 0]
    return (total * scaling).to(dtype)


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities, float32 [tokens], of targets [tokens] under softmax(logits / temperature).

    Args:
        logits: float32 [tokens, vocabulary], after the softcap.
    """
    if temperature != 1.0:
        logits = logits / temperature
    return logits.gather(-1, targets[:, None])[:, 0] - torch.logsumexp(logits, dim=-1)
