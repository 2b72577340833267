"""The Megatron model against transformers' own Beam, in float32."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from beam_rl.model import numerics
from beam_rl.model.batch import PackedBatch
from beam_rl.model.checkpoint import HFCheckpoint, open_checkpoint
from beam_rl.model.config import BeamConfig
from beam_rl.model.gpt import BeamModel
from beam_rl.model.names import export_hf, load_hf, pieces

CASES = ("tiny", "groups", "long")


@dataclass
class Case:
    config: BeamConfig
    checkpoint: HFCheckpoint
    model: BeamModel
    reference: dict[str, Tensor]

    @property
    def tokens(self) -> Tensor:
        return self.reference["input_ids"]

    def score(self, record: bool = False) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Logits [B, S, V], log-probabilities [B, S - 1], and the routes used [B, S, topk] by layer."""
        rows, length = self.tokens.shape
        batch = PackedBatch.from_lengths([length] * rows, record=record)
        logits = self.model(self.tokens.reshape(1, -1), packed_seq_params=batch).view(rows, length, -1)
        pairs = zip(logits, self.tokens, strict=True)
        logprobs = torch.stack([numerics.token_logprobs(each[:-1], tokens[1:]) for each, tokens in pairs])
        return logits, logprobs, {layer: ids.view(rows, length, -1) for layer, ids in batch.recorded.items()}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, golden: Callable[[str], Path], build: Callable) -> Case:
    folder = golden(request.param)
    config, checkpoint = open_checkpoint(folder)
    model = build(config)
    load_hf([model], checkpoint)
    return Case(config, checkpoint, model, load_file(folder / "reference.safetensors"))


def test_logprobs_and_routes_are_the_references(case: Case) -> None:
    with torch.no_grad():
        logits, logprobs, routes = case.score(record=True)
    torch.testing.assert_close(logprobs, case.reference["token_logprobs"], atol=2e-5, rtol=0)
    expected = case.reference["logits"]
    torch.testing.assert_close(logits[:, -expected.shape[1] :], expected, atol=1e-4, rtol=0)
    assert set(routes) == set(case.config.sparse_layers)
    for layer, ids in routes.items():
        chosen = case.reference[f"routes.{layer}"].long()
        assert torch.equal(ids.sort(-1).values, chosen.sort(-1).values), f"layer {layer}"


def test_greedy_continuation_is_the_references(case: Case) -> None:
    greedy = case.reference["greedy"]
    batch = PackedBatch.from_lengths([greedy.shape[1]])
    with torch.no_grad():
        best = case.model(greedy, packed_seq_params=batch)[0].argmax(-1)
    assert torch.equal(best[23:-1], greedy[0, 24:])


def test_gradients_are_the_references(case: Case) -> None:
    expected = {name[5:]: value for name, value in case.reference.items() if name.startswith("grad.")}
    if not expected:
        pytest.skip("the reference has gradients of tiny only")
    case.model.zero_grad()
    (-case.score()[1].mean()).backward()
    gradients = exported_gradients(case.model)
    for name, value in expected.items():
        actual = fuse(gradients, name, case.config.num_experts)
        if actual.numel() > value.numel():
            actual = actual.norm()[None]
        assert (actual - value).norm() <= 1e-4 * value.norm(), name


def exported_gradients(model: BeamModel) -> dict[str, Tensor]:
    """Gradients under Hugging Face names: the model's pieces, of parameters that hold the gradients."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    values = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.grad
    gradients = {piece.name: piece.full().clone() for piece in pieces(model)}
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value
    return gradients


def fuse(tensors: dict[str, Tensor], name: str, experts: int) -> Tensor:
    """The tensor with this name, fused from per-expert ones where it must be."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return tensors[name]
    prefix, _, projection = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
    matrices = [torch.cat([tensors[f"{prefix}.{e}.{part}.weight"] for part in parts]) for e in range(experts)]
    return torch.stack(matrices)


def test_round_trip_through_megatron_is_bit_exact(case: Case) -> None:
    exported = dict(export_hf([case.model]))
    assert list(dict.fromkeys(exported)) == list(exported)
    assert set(exported) == set(case.checkpoint.names())
    for name, tensor in case.checkpoint.tensors(case.config):
        assert torch.equal(exported[name], tensor), name


def test_fused_and_per_expert_checkpoints_load_alike(
    golden: Callable[[str], Path], build: Callable, tmp_path: Path
) -> None:
    config, checkpoint = open_checkpoint(golden("tiny"))
    tensors = dict(checkpoint.tensors(config))
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in config.sparse_layers:
        for projection in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{projection}"
            fused[name] = fuse(tensors, name, config.num_experts)
    save_file(fused, tmp_path / "model.safetensors")
    opened = HFCheckpoint(tmp_path)
    opened.validate(config)
    model = build(config)
    load_hf([model], opened)
    for name, tensor in export_hf([model]):
        assert torch.equal(tensor, tensors[name]), name
