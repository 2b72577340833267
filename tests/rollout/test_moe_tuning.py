"""Tuning ends in time, keeps vLLM's default unless something is faster, and writes what vLLM reads."""

import json
from pathlib import Path

import pytest
import torch

from beam_rl import cli
from beam_rl.model.config import BeamConfig
from beam_rl.rollout.moe_tuning import TOKENS, MoeShape, Tiles, Tuned, candidates, search, table
from beam_rl.tiny import ARCHITECTURE

SHAPE = MoeShape(experts=64, hidden=2048, width=768, topk=8)
DEFAULT: Tiles = {
    "BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1,
    "SPLIT_K": 1, "num_warps": 4, "num_stages": 3,
}  # fmt: skip


class Clock:
    """Every measurement takes a second."""

    now = 0.0

    def measure(self, tokens: int, tiles: Tiles) -> float:
        self.now += 1
        if tiles["BLOCK_SIZE_K"] == 64:
            return float("inf")  # as where tiles do not fit the card
        return 50.0 if tiles["BLOCK_SIZE_N"] == 128 and tokens > 1 else 100.0


def test_the_time_is_shared_and_kept() -> None:
    clock = Clock()
    found = list(search(SHAPE, clock.measure, lambda _: DEFAULT, 60, clock=lambda: clock.now))
    assert clock.now <= 60 + len(TOKENS)
    assert [tuned.tokens for tuned in found] == list(TOKENS)
    assert all(tuned.tried > 1 for tuned in found)


def test_only_what_is_faster_replaces_the_default() -> None:
    clock = Clock()
    one, many = search(SHAPE, clock.measure, lambda _: DEFAULT, 1000, sizes=(1, 256), clock=lambda: clock.now)
    assert one.tiles == DEFAULT
    assert many.tiles["BLOCK_SIZE_N"] == 128
    assert (many.default_us, many.best_us) == (100.0, 50.0)


def test_without_time_every_size_has_the_default() -> None:
    clock = Clock()
    found = search(SHAPE, clock.measure, lambda _: DEFAULT, 0, clock=lambda: clock.now)
    assert [tuned.tiles for tuned in found] == [DEFAULT] * len(TOKENS)


@pytest.mark.parametrize("tokens", TOKENS)
def test_candidates_are_few_and_distinct(tokens: int) -> None:
    found = candidates(SHAPE, tokens)
    assert 5 <= len(found) <= 80
    assert len({json.dumps(tiles) for tiles in found}) == len(found)
    assert all(tiles.keys() == DEFAULT.keys() for tiles in found)


def test_the_table_is_vllms() -> None:
    """vLLM reads `{int(tokens): tiles}`."""
    clock = Clock()
    found = search(SHAPE, clock.measure, lambda _: DEFAULT, 60, clock=lambda: clock.now)
    written = json.loads(table(found, lambda _: DEFAULT))
    assert sorted(map(int, written)) == list(TOKENS)
    assert all(tiles.keys() == DEFAULT.keys() for tiles in written.values())


def test_a_batch_far_from_those_that_were_timed_keeps_its_default() -> None:
    """vLLM takes the nearest entry, also for batches of thousands where only decoding was timed."""

    def default(tokens: int) -> Tiles:
        return DEFAULT | {"BLOCK_SIZE_M": 16 if tokens <= 32 else 64 if tokens <= 512 else 128}

    def tiles(tokens: int) -> Tiles:
        return written[str(min(map(int, written), key=lambda size: abs(size - tokens)))]

    timed = [Tuned(tokens, 100.0, 50.0, DEFAULT | {"BLOCK_SIZE_M": 32}, 9) for tokens in (8, 256)]
    written = json.loads(table(timed, default))
    assert [tiles(tokens)["BLOCK_SIZE_M"] for tokens in (1, 8, 14, 200, 256, 300)] == [32] * 6
    assert [tiles(tokens)["BLOCK_SIZE_M"] for tokens in (1024, 4096, 20_000)] == [128] * 3
    timed = [Tuned(tokens, 100.0, 50.0, DEFAULT | {"BLOCK_SIZE_M": 32}, 9) for tokens in (32, 64)]
    assert "48" not in json.loads(table(timed, default))  # as near to one as to the other, whose default it has


def test_the_shape_follows_the_layout() -> None:
    config = BeamConfig(**ARCHITECTURE)
    assert MoeShape.of(config, 1) == MoeShape(8, 128, 32, 2)
    assert MoeShape.of(config, 2) == MoeShape(8, 128, 16, 2)
    with pytest.raises(ValueError, match="moe_intermediate_size"):
        MoeShape.of(config, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to tune for")
def test_without_a_gpu_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BeamConfig(**ARCHITECTURE, architectures=["BeamForCausalLM"]).save_pretrained(tmp_path)
    assert cli.main(["tune-moe", str(tmp_path), "--out", str(tmp_path / "tables")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert cli.main(["tune-moe", str(tmp_path), "--out", str(tmp_path), "--tensor-parallel", "5"]) == 2
    assert "moe_intermediate_size (32) is not a multiple of 5" in capsys.readouterr().err
