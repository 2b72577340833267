"""Routes stay in one or two bytes an id from the wire to the layer that widens them, and every id survives."""

import numpy as np
import pytest
import torch
from skyrl.backends.skyrl_train.inference_servers.generate_wire import decode_packed_routed_experts, pack_routed_experts
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors, make_router_padding_mask

from beam_rl.model.config import BeamConfig
from beam_rl.trainer.batches import sequences_from_batch
from beam_rl.trainer.engine import EngineConfig, Sequence, TrainerEngine
from beam_rl.trainer.replay import Routing, pack_routes, route_dtype
from beam_rl.trainer.sequences import pack

LENGTHS = (70, 31, 5, 120)


def routes_for(tokens, experts, layers, topk, seed=0):
    """Distinct experts [tokens, layers, topk] in vLLM's type; the first rows have the highest ids and the borders."""
    generator = np.random.default_rng(seed)
    ids = generator.random((tokens, layers, experts)).argsort(-1)[..., :topk]
    edges = [e for e in sorted({255, 256, experts - 1}) if e < experts]
    ids[0, :, : len(edges)] = edges
    ids[0, :, len(edges) :] = np.arange(topk - len(edges))
    return ids.astype(np.uint8 if experts <= 256 else np.uint16)


def batch_of(wire, prompt=3):
    """SkyRL's training batch of samples with these routes: prompts of three tokens."""
    responses = [list(range(3, length)) for length in LENGTHS]
    masks = [[1] * len(response) for response in responses]
    rewards = [[0.0] * len(response) for response in responses]
    sequences, attention, response, _, mask, _, indices, _ = convert_prompts_responses_to_batch_tensors(
        0, [[1] * prompt] * len(LENGTHS), responses, rewards, masks, None, wire
    )
    captured = make_router_padding_mask(attention, [len(rows) for rows in wire])
    data = TrainingInputBatch(
        {
            "sequences": sequences,
            "attention_mask": attention,
            "loss_mask": mask,
            "rollout_expert_indices": indices,
            "router_padding_mask": captured,
        }
    )
    data.metadata = {"response_length": response.shape[1]}
    return data


@pytest.mark.parametrize(("experts", "size"), [(16, 1), (256, 1), (257, 2), (512, 2)])
def test_every_hop_holds_one_byte_an_id_up_to_256_experts_and_two_above(experts, size):
    """Widening costs four to eight times the memory (xtuner#2046, SkyRL#1910, NeMo-RL#2826)."""
    layers, topk = 48, 8
    routing = Routing(layers, tuple(range(layers)), topk, experts)
    limit = 1.1 * sum(LENGTHS) * layers * topk * size
    captured = [routes_for(length - 1, experts, layers, topk, seed=length) for length in LENGTHS]
    wire = [decode_packed_routed_experts(pack_routed_experts(rows)) for rows in captured]
    data = batch_of(wire)
    samples = sequences_from_batch(data)
    packed = pack(samples, range(len(samples)), routing=routing, tp=8).batch.routes
    held = {
        "SkyRL's client": sum(rows.nbytes for rows in wire),
        "SkyRL's batch": data["rollout_expert_indices"].values.nbytes,
        "sequences": sum(sample.routes.nbytes for sample in samples),
        "micro batch": packed.nbytes,
    }
    assert {hop: nbytes <= limit for hop, nbytes in held.items()} == dict.fromkeys(held, True), held
    storage = samples[0].routes.untyped_storage().data_ptr()
    assert storage == data["rollout_expert_indices"].values.untyped_storage().data_ptr()  # views, no second copy
    start = 0
    for rows, length in zip(captured, LENGTHS, strict=True):
        assert np.array_equal(packed[start : start + length - 1].numpy().astype(np.int64), rows.astype(np.int64))
        start += length


@pytest.mark.parametrize("experts", [1, 2, 127, 128, 129, 255, 256, 257, 511, 512, 1024, 32767, 32768])
def test_the_compact_type_holds_the_highest_id_and_is_the_smallest(experts):
    """Ids 128 to 255 through int8 come back negative (verl#7880), and 512 experts overflow uint8 (prime-rl#3051)."""
    dtype = route_dtype(experts)
    assert int(torch.tensor(experts - 1).to(dtype)) == experts - 1
    assert dtype.itemsize == (1 if experts <= 256 else 2)
    ids = torch.tensor([[[experts - 1]]], dtype=dtype)
    packed, _ = pack_routes([ids, ids.to(route_dtype(512))], [None, None], [1, 1])  # samples of unequal types
    assert packed.flatten().tolist() == [experts - 1] * 2


def test_more_experts_than_two_bytes_hold_are_refused():
    with pytest.raises(ValueError, match="32769"):
        route_dtype(32769)


@pytest.mark.parametrize("experts", [256, 512])
def test_the_highest_experts_are_replayed_end_to_end(experts):
    """From vLLM's array over SkyRL's wire and batch into the router of a model with that many experts, and back."""
    config = BeamConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse"],
        moe_intermediate_size=8,
        num_experts=experts,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
    )
    engine = TrainerEngine(EngineConfig(dtype="float32", optimizer=None))
    engine.build(config)
    captured = [routes_for(length - 1, experts, 2, 4, seed=length) for length in LENGTHS]
    samples = sequences_from_batch(batch_of([decode_packed_routed_experts(pack_routed_experts(r)) for r in captured]))
    used = engine.score(samples, routes=True).routes
    assert used is not None
    for rows, ids in zip(captured, used, strict=True):
        assert np.array_equal(ids[:-1, 1].numpy(), rows[:, 1].astype(np.int16))
        assert {255, experts - 1} <= set(ids[0, 1].tolist())
    other = [Sequence(s.tokens, s.loss_mask, routes=s.routes.flip(0)) for s in samples]
    one, two = engine.score(samples).logprobs[0], engine.score(other).logprobs[0]
    assert not torch.equal(one, two)
