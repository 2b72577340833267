"""Adapters on a built model, in float32 and one process: their function, gradients, merging and first values."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from beam_rl.model.batch import PackedBatch
from beam_rl.model.checkpoint import HFCheckpoint, save_hf
from beam_rl.model.config import BeamConfig
from beam_rl.model.gpt import BeamModel
from beam_rl.model.lora import attach, dropout, pairs
from beam_rl.model.lora_config import LoraConfig
from beam_rl.model.names import export_adapter, export_hf, fingerprint, load_hf, pieces
from beam_rl.model.tensors import initial_tensors

LENGTHS = [9, 14, 1, 20]
ALL = LoraConfig(r=8, lora_alpha=16)


@pytest.fixture(scope="module")
def base(small: BeamConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "base"
    save_hf(folder, small, initial_tensors(small, seed=5, dtype=torch.float32))
    return folder


@pytest.fixture
def adapted(small: BeamConfig, build: Callable[..., BeamModel], base: Path) -> Callable[..., BeamModel]:
    """Builds the base with adapters; trained ones have a B that is not zero."""

    def make(
        lora: LoraConfig = ALL, trained: bool = True, seed: int = 1, dtype: torch.dtype = torch.float32
    ) -> BeamModel:
        model = build(small, dtype)
        attach(model, lora, seed)
        load_hf([model], HFCheckpoint(base))
        if trained:
            train(model)
        return model

    return make


def train(model: BeamModel, seed: int = 0, size: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for pair in pairs(model):
        pair.lora_B.data += torch.randn(pair.lora_B.shape, generator=generator) * size


def logits(model: BeamModel) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, model.config.beam.vocab_size, (1, sum(LENGTHS)), generator=generator)
    return model(tokens, packed_seq_params=PackedBatch.from_lengths(LENGTHS))


@torch.no_grad()
def merged(model: BeamModel, build: Callable[..., BeamModel], dtype: torch.dtype = torch.float32) -> BeamModel:
    """A plain model with the weights that an adapted one exports."""
    plain = build(model.config.beam, dtype)
    weights = dict(export_hf([model]))
    for piece in pieces(plain):
        piece.view.copy_(weights[piece.name].view(piece.view.shape))
    return plain


TARGETS = [
    ALL.target_modules,
    ("v_proj", "self_attn.gate_proj", "o_proj", "experts.gate_proj"),
    ("q_proj", "mlp.up_proj", "mlp.down_proj", "experts.up_proj", "experts.down_proj"),
]


@pytest.mark.parametrize("targets", TARGETS, ids=lambda targets: "+".join(targets))
def test_an_adapter_is_what_its_merged_weights_are(
    targets: tuple[str, ...], adapted: Callable[..., BeamModel], build: Callable
) -> None:
    model = adapted(LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    plain = adapted(trained=False)
    with torch.no_grad():
        assert (logits(model) - logits(plain)).abs().max() > 1e-2  # otherwise nothing is compared
        torch.testing.assert_close(logits(model), logits(merged(model, build)), atol=2e-5, rtol=0)


def test_in_bfloat16_both_sides_of_a_rollout_score_the_same_policy(
    adapted: Callable[..., BeamModel], build: Callable
) -> None:
    """A trainer that adds an adapter's output to the base's rounds elsewhere than a rollout with merged weights."""
    model = adapted(dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(logits(model), logits(merged(model, build, torch.bfloat16)))


def test_added_outputs_are_the_merged_product(adapted: Callable[..., BeamModel]) -> None:
    """Dropout needs adapters that add their output; with nothing dropped they compute what merged weights do."""
    model, added = adapted(), adapted(LoraConfig(r=8, lora_alpha=16, lora_dropout=1e-12))
    expected = logits(model)
    with dropout([added]):
        found = logits(added)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    for values in (found, expected):
        values.logsumexp(-1).sum().backward()
    for (name, one), (_, other) in zip(model.named_parameters(), added.named_parameters(), strict=True):
        if one.requires_grad:
            assert one.grad is not None
            assert other.grad is not None
            assert (one.grad - other.grad).norm() <= 1e-4 * one.grad.norm(), name


@pytest.mark.parametrize("targets", TARGETS, ids=lambda targets: "+".join(targets))
def test_gradients_are_the_merged_weights_projected(
    targets: tuple[str, ...], adapted: Callable[..., BeamModel], build: Callable
) -> None:
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=targets)
    model = adapted(lora)
    plain = merged(model, build)
    for each in (model, plain):
        logits(each).logsumexp(-1).sum().backward()
    parameters = [parameter for parameter in plain.parameters() if parameter.grad is not None]
    for parameter in parameters:
        parameter.data = parameter.grad  # type: ignore[assignment]
    weights = {piece.name: piece.full() for piece in pieces(plain)}
    count = 0
    for pair in pairs(model):
        for i in range(1 if pair.experts is None else len(pair.experts)):
            name = pair.name if pair.experts is None else pair.name.replace("experts.", f"experts.{pair.experts[i]}.")
            a, b = (matrix if pair.experts is None else matrix[i] for matrix in (pair.lora_A, pair.lora_B))
            grads = [m.grad if pair.experts is None else m.grad[i] for m in (pair.lora_A, pair.lora_B)]  # type: ignore[index]
            weight = weights[f"{name}.weight"]
            for grad, expected in zip(grads, (lora.scale * b.T @ weight, lora.scale * weight @ a.T), strict=True):
                assert grad is not None
                assert (grad - expected).norm() <= 1e-4 * expected.norm() + 1e-7, name
                count += 1
    assert count > 0
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if ".adapter." in name}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_untrained_adapter_is_the_base_bit_for_bit(
    dtype: torch.dtype, adapted: Callable[..., BeamModel], small: BeamConfig, build: Callable, base: Path
) -> None:
    model = adapted(trained=False, dtype=dtype)
    plain = build(small, dtype)
    load_hf([plain], HFCheckpoint(base))
    with torch.no_grad():
        assert torch.equal(logits(model), logits(plain))
    exported = dict(export_hf([plain]))
    for name, tensor in export_hf([model]):
        assert torch.equal(tensor, exported[name]), name


def test_a_merge_after_each_of_200_updates_does_not_drift(adapted: Callable[..., BeamModel]) -> None:
    """Merging into the weights and taking it out again drifts in bfloat16; an export starts from the base."""
    model, once = (adapted(trained=False, dtype=torch.bfloat16) for _ in range(2))
    before = {piece.name: piece.view.clone() for piece in pieces(model)}
    for step in range(200):
        train(model, seed=step, size=1e-3)
        for piece in pieces(model):
            piece.full()
    for pair, other in zip(pairs(model), pairs(once), strict=True):
        other.lora_B.data.copy_(pair.lora_B.data)
    single = dict(export_hf([once]))
    for name, tensor in export_hf([model]):
        assert torch.equal(tensor, single[name]), name
    for piece in pieces(model):
        assert torch.equal(piece.view, before[piece.name]), piece.name


def test_a_merge_rounds_once(adapted: Callable[..., BeamModel]) -> None:
    model = adapted(dtype=torch.bfloat16)
    base = adapted(trained=False, dtype=torch.bfloat16)
    weights = {piece.name: piece.view.reshape(piece.shape) for piece in pieces(base)}
    exported = dict(export_hf([model]))
    adapters = dict(export_adapter([model]))
    for name in (
        "model.layers.1.self_attn.k_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.2.mlp.experts.5.down_proj",
    ):
        a, b = (adapters[f"base_model.model.{name}.lora_{matrix}.weight"].double() for matrix in "AB")
        exact = weights[f"{name}.weight"].double() + ALL.scale * b @ a
        difference = (exported[f"{name}.weight"].double() - exact).abs()
        assert (difference <= exact.abs() * 2**-8 * (1 + 1e-4)).all(), name  # half a unit in bfloat16's last place
        assert not torch.equal(exported[f"{name}.weight"], weights[f"{name}.weight"])


def test_first_values_follow_the_seed_and_the_name_alone(adapted: Callable[..., BeamModel]) -> None:
    first = dict(export_adapter([adapted(trained=False)]))
    again = dict(export_adapter([adapted(LoraConfig(target_modules=("up_proj",)), trained=False)]))
    other = dict(export_adapter([adapted(trained=False, seed=2)]))
    assert len(first) == 2 * (4 * 5 + 2 * 3 + 2 * 8 * 3)
    assert len(again) == 2 * (2 + 2 * 8)
    for name, tensor in first.items():
        if name in again:
            assert torch.equal(again[name], tensor), name
        if ".lora_B." in name:
            assert not tensor.any()
        else:
            assert not torch.equal(other[name], tensor), name
            bound = 1 / math.sqrt(tensor.shape[1])
            assert bound * 0.8 < tensor.abs().max() <= bound
    values = [tensor for name, tensor in first.items() if ".lora_A." in name and tensor.shape == (8, 32)]
    assert len({tuple(tensor.flatten().tolist()) for tensor in values}) == len(values)
    gaussian = dict(export_adapter([adapted(LoraConfig(init_lora_weights="gaussian"), trained=False)]))
    drawn = torch.cat([tensor.flatten() for name, tensor in gaussian.items() if ".lora_A." in name])
    assert drawn.std().item() == pytest.approx(1 / 8, rel=0.05)


def test_dropout_acts_only_while_gradients_are_computed(adapted: Callable[..., BeamModel]) -> None:
    model, without = adapted(LoraConfig(lora_alpha=16, lora_dropout=0.5)), adapted()
    with torch.no_grad():
        expected = logits(without)
        assert torch.equal(logits(model), expected)
        with dropout([model]):
            first, second = logits(model), logits(model)
        assert not torch.equal(first, expected)
        assert not torch.equal(first, second)
        assert torch.equal(logits(model), expected)


def test_a_fingerprint_tells_bases_apart_and_not_adapters(adapted: Callable[..., BeamModel]) -> None:
    model = adapted(trained=False)
    first = fingerprint([model])
    train(model)
    assert fingerprint([model]) == first
    piece = next(piece for piece in pieces(model) if piece.name == "model.layers.2.mlp.experts.5.down_proj.weight")
    piece.view[0, 0] = torch.nextafter(piece.view[0, 0], torch.tensor(9.0))
    assert fingerprint([model]) != first
