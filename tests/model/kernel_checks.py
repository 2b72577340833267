"""Run by `test_kernels.py`: one kernel against `numerics`, over odd shapes, forward and gradient."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from beam_rl.model import numerics
from beam_rl.model.kernels import experts, gradients, head, heads, mlp, norm, route
from beam_rl.model.rows import ExpertOrder, sort_by_expert

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIRST = (True, torch.zeros(1, dtype=torch.int32, device=DEVICE))
"""Whether a gradient is the first, as training says it, and as CUDA graphs."""
EPS = 1e-5
ROWS = (1, 5, 17)
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter cuts bfloat16 instead of rounding
DTYPES = (torch.float32, HALF)


def rand(*shape: int, dtype: torch.dtype = torch.float32, around: float = 0.0) -> Tensor:
    """A leaf with a gradient."""
    return (torch.randn(*shape, device=DEVICE) + around).to(dtype).requires_grad_()


def compare(
    ours: Callable[..., Any], definition: Callable[..., Any], inputs: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """Outputs equal to the last bit or so; gradients as near to float64's as the dtype allows."""
    results = _run(ours, inputs)
    plain = _run(definition, inputs)
    exact = _run(definition, [x.detach().double().requires_grad_() for x in inputs])
    step = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    for out, expected in zip(results[0], plain[0], strict=True):
        assert out.dtype == expected.dtype
        torch.testing.assert_close(out, expected, rtol=step, atol=step * 2)
        if dtype == HALF:
            assert (out != expected).float().mean() < 0.01, "rounded at other points than the definition"
    for grad, expected, true in zip(results[1], plain[1], exact[1], strict=True):
        scale = float(true.abs().max()) + 1e-30
        error = float((grad.double() - true).abs().max()) / scale
        reference = float((expected.double() - true).abs().max()) / scale
        assert error < max(2 * reference, 8 * step), f"gradient off by {error:.1e}, the definition's by {reference:.1e}"


def _run(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    outputs = function(*inputs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(out.shape, generator=generator).to(out) for out in outputs]
    grads = torch.autograd.grad(outputs, list(inputs), weights)
    return [out.detach() for out in outputs], list(grads)


def check_norm() -> None:
    for dtype in DTYPES:
        for rows in ROWS:
            for width in (8, 96, 130):
                x, w = rand(rows, width, dtype=dtype), rand(width, dtype=dtype, around=1.0)
                compare(lambda x, w: norm.rms_norm(x, w, EPS), lambda x, w: numerics.rms_norm(x, w, EPS), (x, w), dtype)


def check_boundary() -> None:
    n = 7

    def single(branch: Tensor, w: Tensor, residual: Tensor) -> Tensor:
        return numerics.depth_residual(numerics.rms_norm(branch, w, EPS), residual, n)

    def double(branch: Tensor, w: Tensor, residual: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        total = single(branch, w, residual)
        return total, numerics.rms_norm(total, after, EPS)

    factors = numerics.depth_scales(n)
    for dtype in DTYPES:
        for rows in ROWS:
            for width in (16, 100):
                branch, residual = rand(rows, width, dtype=dtype), rand(rows, width, dtype=dtype)
                w, after = rand(width, dtype=dtype, around=1.0), rand(width, dtype=dtype, around=1.0)
                compare(
                    lambda b, w, r: norm.residual_addition(b, w, r, EPS, factors), single, (branch, w, residual), dtype
                )
                compare(
                    lambda b, w, r, a: norm.boundary(b, w, r, a, EPS, factors),
                    double,
                    (branch, w, residual, after),
                    dtype,
                )


def check_swiglu() -> None:
    for dtype in DTYPES:
        for rows, width in ((1, 3), (5, 1030), (17, 64)):
            x = rand(rows, 2 * width, dtype=dtype)
            compare(mlp.swiglu, lambda x: numerics.swiglu(*x.chunk(2, -1)), (x,), dtype)


def check_combine() -> None:
    for dtype in DTYPES:
        for tokens, topk, width in ((1, 1, 5), (7, 4, 1030), (3, 8, 64)):
            rows = rand(tokens * topk, width, dtype=dtype)
            weights = torch.rand(tokens, topk, device=DEVICE, requires_grad=True)
            places = torch.randperm(tokens * topk, device=DEVICE)

            def definition(rows: Tensor, weights: Tensor, places: Tensor = places) -> Tensor:
                gathered = rows[places].view(*weights.shape, -1)
                total = (weights[..., None] * gathered.to(weights.dtype)).sum(1)
                return (total * 2.5).to(rows.dtype)

            def kernel(rows: Tensor, weights: Tensor, places: Tensor = places, dtype: torch.dtype = dtype) -> Tensor:
                return mlp.combine(rows, places, weights, 2.5, dtype)

            compare(kernel, definition, (rows, weights), dtype)


def check_spread() -> None:
    for dtype in DTYPES:
        for tokens, copies, width in ((1, 2, 5), (7, 4, 1030)):
            order = torch.randperm(tokens * copies, device=DEVICE)
            places = torch.empty_like(order)
            places[order] = torch.arange(len(order), device=DEVICE)
            x = rand(tokens, width, dtype=dtype)
            compare(
                lambda x, order=order, places=places, copies=copies: mlp.spread_rows(
                    x, order // copies, places, copies
                ),
                lambda x, order=order, copies=copies: x[order // copies],
                (x,),
                dtype,
            )


def check_experts() -> None:
    def linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        if x.dtype != torch.float64:
            return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
        parts = x.tensor_split(ends[:-1].cpu().long())
        return torch.cat([part @ matrix.t() for part, matrix in zip(parts, weight, strict=True)])

    for dtype in DTYPES:
        for tokens, topk, count, hidden, width in ((1, 1, 2, 16, 8), (40, 2, 5, 32, 24), (9, 4, 8, 64, 1032)):
            ids = torch.rand(tokens, count - 1, device=DEVICE).topk(topk).indices  # the last expert has no tokens
            order = sort_by_expert(ids, torch.bincount(ids.flatten(), minlength=count)[None])

            def definition(
                x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, order: ExpertOrder = order
            ) -> Tensor:
                rows = linear(x[order.tokens], gate_up, order.ends)
                outputs = linear(numerics.swiglu(*rows.chunk(2, -1)), down, order.ends)[order.places]
                total = (weights[..., None] * outputs.view(*weights.shape, -1).to(weights.dtype)).sum(1)
                return (total * 2.5).to(x.dtype)

            def kernel(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, order: ExpertOrder = order) -> Tensor:
                return experts.experts(x, gate_up, down, weights, order, 2.5)

            inputs = [rand(tokens, hidden, dtype=dtype)]
            for shape in ((count, 2 * width, hidden), (count, hidden, width)):
                inputs.append((torch.randn(shape, device=DEVICE) * shape[-1] ** -0.5).to(dtype).requires_grad_())
            inputs.append(torch.rand(tokens, topk, device=DEVICE, requires_grad=True))
            compare(kernel, definition, inputs, dtype)


def check_gradients() -> None:
    for size in (1, 4096, 100_003):
        for first in FIRST:
            total, grad = torch.randn(size, device=DEVICE), torch.randn(size, device=DEVICE).to(HALF)
            expected = grad.float() if bool(first) else total + grad
            gradients.accumulate_(total, grad, first=first)
            assert torch.equal(total, expected)


def check_products() -> None:
    for height, width in ((8, 24), (130, 40), (136, 264)):
        ends = torch.tensor([0, 5, 5, 75, 139], dtype=torch.int32, device=DEVICE)
        a, b = (torch.randn(int(ends[-1]), size, device=DEVICE).to(HALF) for size in (height, width))
        parts = [(x.double().tensor_split(ends[:-1].cpu().long())) for x in (a, b)]
        exact = torch.stack([one.t() @ other for one, other in zip(*parts, strict=True)])
        for first in FIRST:
            total = torch.randn(exact.shape, device=DEVICE)
            expected = exact if bool(first) else exact + total
            gradients.add_products_(total, a, b, ends, first=first)
            torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)


def check_claimed() -> None:
    """Experts whose weights have a sum of gradients add to it, in float32, and autograd gets none."""
    from beam_rl.model import fused

    ids = torch.rand(40, 4, device=DEVICE).topk(2).indices  # the last of five experts has no tokens
    order = sort_by_expert(ids, torch.bincount(ids.flatten(), minlength=5)[None])
    x, weights = rand(40, 32, dtype=HALF), torch.rand(40, 2, device=DEVICE)
    pair = [(torch.randn(s, device=DEVICE) * 0.2).to(HALF).requires_grad_() for s in ((5, 48, 32), (5, 32, 24))]
    forms = [lambda: experts.experts(x, *pair, weights, order, 2.5)]
    if DEVICE == "cuda":  # step by step they have kernels there alone
        forms.append(lambda: fused.experts_mlp(x[order.tokens], *pair, order.ends))
    for form in forms:
        grads = torch.autograd.grad(form().float().sin().sum(), pair)
        for first in (True, False):
            totals = [torch.ones_like(grad, dtype=torch.float32) for grad in grads]
            for weight, total in zip(pair, totals, strict=True):
                weight.claim_main_grad = lambda total=total, first=first: (total, first)  # type: ignore[attr-defined]
            form().float().sin().sum().backward()
            for weight, grad, total in zip(pair, grads, totals, strict=True):
                assert weight.grad is None
                del weight.claim_main_grad
                error = float((total - grad.float() - (0 if first else 1)).abs().max())
                assert error < 0.01 * float(grad.abs().max()), f"off by {error:.1e}"


def check_heads() -> None:
    for dtype in DTYPES:
        for tokens, groups, inner, dim in ((1, 1, 1, 8), (5, 2, 3, 24), (70, 2, 2, 32)):
            mixed = rand(tokens, groups * (2 * inner + 2) * dim, dtype=dtype)
            q_weight, k_weight = rand(dim, dtype=dtype, around=1.0), rand(dim, dtype=dtype, around=1.0)
            positions = torch.arange(tokens, device=DEVICE) * 700
            for rope in (True, False):
                turn = numerics.rope_cos_sin(positions, numerics.rope_inverse_frequencies(dim, 1e4, DEVICE))
                stretch = numerics.ssmax_scale(positions)

                def definition(
                    mixed: Tensor, qw: Tensor, kw: Tensor, sizes: Any = (groups, inner, dim), rope: bool = rope,
                    turn: Any = turn, stretch: Tensor = stretch,
                ) -> tuple[Tensor, ...]:  # fmt: skip
                    groups, inner, dim = sizes
                    parts = mixed.view(len(mixed), groups, -1, dim).split([inner, inner, 1, 1], dim=2)
                    q, gate, k, v = (x.flatten(1, 2) for x in parts)
                    q, k = numerics.rms_norm(q, qw, EPS), numerics.rms_norm(k, kw, EPS)
                    if rope:
                        q, k = numerics.rotate(q, *turn), numerics.rotate(k, *turn)
                    else:
                        q = (q.float() * stretch[:, None, None]).to(q.dtype)
                    return q, gate, k, v

                def kernel(
                    mixed: Tensor, qw: Tensor, kw: Tensor, groups: int = groups, rope: bool = rope,
                    turn: Any = turn, stretch: Tensor = stretch,
                ) -> tuple[Tensor, ...]:  # fmt: skip
                    how: Any = {"rotation": turn} if rope else {"stretch": stretch}
                    return heads.split_heads(mixed, qw, kw, groups, EPS, **how)

                compare(kernel, definition, (mixed, q_weight, k_weight), dtype)


def check_gate() -> None:
    for dtype in DTYPES:
        for tokens, count, dim in ((1, 1, 8), (9, 3, 24)):
            attention, gate = rand(tokens, count, dim, dtype=dtype), rand(tokens, count, dim, dtype=dtype)
            compare(heads.output_gate, numerics.output_gate, (attention, gate, rand(count, dtype=dtype)), dtype)


def check_head() -> None:
    """The softmax's statistics and its gradient, which `head` uses in place of autograd."""
    for dtype in DTYPES:
        for rows, vocabulary in ((1, 7), (5, 4099)):
            for cap in (None, 3.0):
                logits = 4 * torch.randn(rows, vocabulary, device=DEVICE).to(dtype)
                targets = torch.randint(0, vocabulary, (rows,), device=DEVICE)
                z = (numerics.softcap(logits, cap) / 0.7).double()
                top, mass, moment = head.statistics(logits, cap, 0.7).double().unbind(1)
                torch.testing.assert_close(top, z.amax(-1), rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(top + mass.log(), z.logsumexp(-1), rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(moment / mass, (z.softmax(-1) * z).sum(-1), rtol=1e-4, atol=1e-5)

                exact = logits.double().requires_grad_()
                scaled = (exact if cap is None else torch.tanh(exact / cap) * cap) / 0.7
                weights = torch.randn(rows, device=DEVICE)
                (scaled.log_softmax(-1).gather(1, targets[:, None])[:, 0] * weights).sum().backward()
                assert exact.grad is not None
                normaliser = scaled.logsumexp(-1).float()
                found = head.gradient_(logits.clone(), targets, normaliser, weights, 0, cap, 0.7)
                step = {torch.float32: 2.0**-18, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[dtype]
                torch.testing.assert_close(found.double(), exact.grad, rtol=4 * step, atol=4 * step)


ROUTINGS = (  # tokens, experts, topk, groups, groups chosen
    (1, 4, 2, 1, 1), (5, 10, 3, 5, 2), (70, 64, 8, 8, 4), (9, 96, 6, 3, 2), (200, 12, 5, 2, 2), (17, 260, 32, 1, 1),
)  # fmt: skip


def check_route() -> None:
    for dtype in DTYPES:
        for tokens, count, topk, groups, best in ROUTINGS:
            hidden = 16
            x, weight = rand(tokens, hidden, dtype=dtype), rand(count, hidden)
            bias = 0.2 * torch.randn(count, device=DEVICE)
            wanted = torch.rand(tokens, count, device=DEVICE).topk(topk).indices
            packed = wanted.to(torch.uint8 if count <= 256 else torch.int16)[:, None].expand(-1, 3, -1).contiguous()
            for normalise in (True, False):
                for replay in (None, (packed[:, 1], None), (packed[:, 1], torch.arange(tokens, device=DEVICE) % 3 > 0)):
                    rule = (bias, topk, groups, best, normalise)
                    logits = numerics.router_logits(x, weight)
                    ids = numerics.route(logits, *rule)[1]
                    if replay is not None:
                        ids = wanted if replay[1] is None else torch.where(replay[1][:, None], wanted, ids)
                    same, _, found, counts = route.route(x, weight, *rule, replay)
                    assert torch.equal(same, x)
                    assert torch.equal(found, ids)
                    assert torch.equal(counts.sum(0), torch.bincount(ids.flatten(), minlength=count))

                    def definition(
                        x: Tensor, weight: Tensor, ids: Tensor = ids, normalise: bool = normalise
                    ) -> tuple[Tensor, Tensor]:
                        weights = numerics.route_weights(F.linear(x.to(weight.dtype), weight), ids, normalise)
                        return x.to(weight.dtype) * 0.5, weights  # the experts' part, which meets the router's in x

                    def kernel(
                        x: Tensor, weight: Tensor, rule: Any = rule, replay: Any = replay
                    ) -> tuple[Tensor, Tensor]:
                        same, weights, *_ = route.route(x, weight, *rule, replay)
                        return same.to(weight.dtype) * 0.5, weights

                    compare(kernel, definition, (x, weight), torch.float32)
    _check_pieces()
    _check_ties()
    _check_nan()


def _check_pieces() -> None:
    """The weight's gradient from an input in bfloat16 is no less exact than float32's."""
    x, weight, bias = rand(70, 32).detach().bfloat16(), rand(12, 32), torch.zeros(12, device=DEVICE)
    wanted = torch.rand(70, 12, device=DEVICE).topk(3).indices

    def definition(weight: Tensor) -> Tensor:
        return numerics.route_weights(F.linear(x.to(weight.dtype), weight), wanted)

    compare(lambda w: route.route(x, w, bias, 3, 2, 1, True, (wanted, None))[1], definition, (weight,), torch.float32)


def _check_ties() -> None:
    """Of equal scores the lower id is chosen, and stands first; of equal groups the first."""
    logits = torch.tensor([[0.0] * 12, [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0], [-1] * 4 + [2] * 8], device=DEVICE)
    eye, bias = torch.eye(12, device=DEVICE), torch.zeros(12, device=DEVICE)
    ids = route.route(logits, eye, bias, 4, 3, 2, True, None)[2]
    assert ids.tolist() == [[0, 1, 2, 3], [7, 8, 9, 4], [4, 5, 6, 7]]
    low = torch.full((1, 12), -200.0, device=DEVICE)  # whose sigmoid is 0
    assert route.route(low, eye, bias, 4, 3, 2, True, None)[2].tolist() == [[0, 1, 2, 3]]
    assert route.route(low, eye, bias - 1, 4, 3, 2, True, None)[2].tolist() == [[0, 1, 2, 3]]


def _check_nan() -> None:
    """NaN, and replayed ids that no expert has, give NaN to their own token and distinct or sane ids to all."""
    count = 10
    logits = torch.randn(4, count, device=DEVICE)
    logits[1, 7], logits[2] = float("nan"), float("nan")
    logits[3, 2], logits[3, 5] = float("inf"), float("-inf")
    eye, bias = torch.eye(count, device=DEVICE), torch.zeros(count, device=DEVICE)
    bias[4] = float("-inf")

    def at_logits(ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        original = numerics.router_logits
        numerics.router_logits = lambda x, _: x  # a product would spread the NaN over all experts
        try:
            return route.route(logits, eye, bias, 4, 5, 3, True, None if ids is None else (ids, None))[1:3]
        finally:
            numerics.router_logits = original

    weights, ids = at_logits()
    assert weights.isnan().any(-1).tolist() == [False, True, True, False]
    assert ((ids >= 0) & (ids < count)).all()
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert ids[1, 0] == 7
    weights, ids = at_logits(torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 10, -1]], device=DEVICE))
    assert weights[3].isnan().all()
    assert ids[3].tolist() == [0, 1, 0, 0]


def check_sort() -> None:
    """As a stable sort does it, also where a token has an expert twice, and where there is no token."""
    eye = torch.eye(260, device=DEVICE)
    for tokens, count, topk, *_ in (*ROUTINGS, (0, 6, 2), (150, 3, 2), (300, 130, 4)):
        for twice in (False, True):
            shape = (tokens, topk)
            ids = torch.rand(tokens, count, device=DEVICE).topk(topk).indices
            if twice:
                ids = torch.randint(0, count, shape, device=DEVICE)
            x = torch.zeros(tokens, 260, device=DEVICE)
            _, _, same, counts = route.route(x, eye[:count], eye[0, :count], topk, 1, 1, True, (ids, None))
            assert torch.equal(same, ids)
            expected = sort_by_expert(ids, torch.bincount(ids.flatten(), minlength=count)[None])
            for found, right in zip(route.sort(ids, counts), expected, strict=True):
                assert found.dtype == right.dtype
                assert torch.equal(found, right)


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[f"check_{sys.argv[1]}"]()
