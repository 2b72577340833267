"""Tile sizes for vLLM's Triton MoE kernel, found by timing it: for one shape on one card.

vLLM 0.33 looks a table up by the experts and the width that a device holds, and by the card's name
(`get_moe_configs` in vllm/model_executor/layers/fused_moe/fused_moe.py); a batch takes the entry of the nearest number
of tokens. Without a table it takes general defaults.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Tiles = dict[str, int]
"""BLOCK_SIZE_M, _N, _K, GROUP_SIZE_M, SPLIT_K, num_warps and num_stages, as vLLM names them."""

TOKENS = (1, 8, 32, 64, 128, 256, 512, 2048, 8192)
"""Batches to tune for: decoding of so many sequences, and prefill."""
BETWEEN = sorted(size for power in range(3, 16) for size in (1 << power, 3 << (power - 1)))
"""Batches that may need an entry of their own, although nothing was timed for them."""
CALLS = 10
"""Calls in one CUDA graph, each with its own routes, so that no call finds its experts in the cache."""


@dataclass(frozen=True)
class MoeShape:
    """What one device computes of a layer's experts."""

    experts: int
    hidden: int
    width: int
    """Of an expert's SwiGLU, this device's part of it."""
    topk: int

    @classmethod
    def of(cls, config: Any, tensor_parallel: int) -> "MoeShape":
        """The shape with a part of every expert a device.

        Raises:
            ValueError: the experts cannot be split over so many devices.
        """
        width = config.moe_intermediate_size
        if width % tensor_parallel:
            raise ValueError(f"moe_intermediate_size ({width}) is not a multiple of {tensor_parallel}")
        return cls(
            experts=config.num_experts,
            hidden=config.hidden_size,
            width=width // tensor_parallel,
            topk=config.num_experts_per_tok,
        )


@dataclass(frozen=True)
class Tuned:
    """The best of one batch size."""

    tokens: int
    default_us: float
    best_us: float
    tiles: Tiles
    tried: int


def candidates(shape: MoeShape, tokens: int) -> list[Tiles]:
    """Tile sizes worth timing, the likeliest first: rows near the tokens that an expert gets, columns that divide."""
    each = tokens * shape.topk / shape.experts
    rows = [rows for rows in (16, 32, 64, 128) if rows <= max(16, 4 * each) and (rows >= each / 8 or rows == 128)]
    rows.sort(key=lambda size: abs(size - max(16, each)))
    found = []
    for block_m in rows:
        for block_n, block_k, warps, stages in (
            (64, 128, 4, 4), (128, 64, 4, 4), (64, 64, 4, 4), (128, 128, 4, 3), (128, 64, 8, 4), (256, 64, 8, 3),
            (64, 256, 4, 3), (32, 128, 4, 4), (32, 256, 4, 3), (256, 64, 8, 4), (128, 64, 4, 3), (64, 128, 4, 3),
        ):  # fmt: skip
            small = block_n < 64 and block_m > 32
            slow = block_m * block_n >= 128 * 256 and warps < 8
            if shape.width % min(block_n, 64) or small or slow:
                continue
            for group in (1, 16) if each > 64 else (1,):
                found.append(
                    {
                        "BLOCK_SIZE_M": block_m,
                        "BLOCK_SIZE_N": block_n,
                        "BLOCK_SIZE_K": block_k,
                        "GROUP_SIZE_M": group,
                        "SPLIT_K": 1,
                        "num_warps": warps,
                        "num_stages": stages,
                    }
                )
    return found


def search(
    shape: MoeShape,
    measure: Callable[[int, Tiles], float],
    default: Callable[[int], Tiles],
    seconds: float,
    sizes: Iterable[int] = TOKENS,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Tuned]:
    """Time the candidates of every batch size, each in its share of the time, and yield its best.

    Args:
        measure: microseconds of one call with so many tokens and these tiles; infinite where they do not fit the card.
        default: the tiles that vLLM takes without a table. They are always timed, and kept unless another is faster.
        seconds: time for everything. Compiling takes most of it: a second run finds the kernels of the first.
    """
    sizes = list(sizes)
    end = clock() + seconds
    for index, tokens in enumerate(sizes):
        until = clock() + (end - clock()) / (len(sizes) - index)
        base = default(tokens)
        first = best_us = measure(tokens, base)
        best, tried = base, 1
        for tiles in candidates(shape, tokens):
            if clock() > until:
                break
            if tiles == base:
                continue
            took, tried = measure(tokens, tiles), tried + 1
            if took < 0.99 * best_us:
                best, best_us = tiles, took
        yield Tuned(tokens, first, best_us, best, tried)


def table(found: Iterable[Tuned], default: Callable[[int], Tiles]) -> str:
    """The file's content: tiles by number of tokens.

    vLLM takes the nearest entry for every batch. So batches far from those that were timed, for which it has other
    defaults, get entries with them: what is best for 256 tokens need not be better than the default for 1,024.
    """
    entries = {tuned.tokens: tuned.tiles for tuned in found}
    timed = list(entries)
    for tokens in BETWEEN:
        least = min(abs(size - tokens) for size in timed)
        if default(tokens) not in (default(size) for size in timed if abs(size - tokens) == least):
            entries[tokens] = default(tokens)
    return json.dumps({str(tokens): entries[tokens] for tokens in sorted(entries)}, indent=4) + "\n"


def tune(
    shape: MoeShape,
    out: Path,
    seconds: float,
    tell: Callable[[Tuned], None] | None = None,
    sizes: Iterable[int] = TOKENS,
) -> tuple[Path, list[Tuned]]:
    """Tune on this process's GPU, and write the table into the folder under the name that vLLM looks up.

    Args:
        tell: is given every batch size's best as soon as it is known.
        sizes: batches to tune for, in tokens.
    """
    from vllm.model_executor.layers.fused_moe.fused_moe import get_config_file_name, get_default_config

    def default(tokens: int) -> Tiles:
        return get_default_config(tokens, shape.experts, shape.width, shape.hidden, shape.topk, None)

    found = []
    for tuned in search(shape, Bench(shape).measure, default, seconds, sizes):
        found.append(tuned)
        if tell is not None:
            tell(tuned)
    out.mkdir(parents=True, exist_ok=True)
    file = out / get_config_file_name(shape.experts, shape.width, None)
    file.write_text(table(found, default), encoding="utf-8")
    return file, found


class Bench:
    """vLLM's fused experts in bfloat16, with random weights and even routes."""

    def __init__(self, shape: MoeShape) -> None:
        import torch

        self.shape = shape

        def random(*size: int) -> Any:
            return torch.randn(size, device="cuda", dtype=torch.bfloat16) * 0.02

        self.gate_up = random(shape.experts, 2 * shape.width, shape.hidden)
        self.down = random(shape.experts, shape.hidden, shape.width)

    def measure(self, tokens: int, tiles: Tiles) -> float:
        """Microseconds of one call, the best of a few replays of a CUDA graph of calls."""
        import torch
        from triton.runtime.errors import OutOfResources, PTXASError
        from vllm.model_executor.layers.fused_moe import fused_experts, override_config

        shape = self.shape
        hidden = torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
        routes = [
            torch.rand(tokens, shape.experts, device="cuda").topk(shape.topk, dim=-1).indices.int()
            for _ in range(CALLS)
        ]
        weights = torch.full((tokens, shape.topk), 1 / shape.topk, device="cuda")

        def call(ids: Any) -> None:
            fused_experts(hidden, self.gate_up, self.down, weights, ids)

        with torch.inference_mode(), override_config(tiles):
            try:
                call(routes[0])
            except (OutOfResources, PTXASError):
                return float("inf")
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for ids in routes:
                    call(ids)
        times = []
        for _ in range(6):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        return 1e3 * min(times[1:]) / CALLS
