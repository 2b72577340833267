"""Weights written straight into a running engine's parameters: where every tensor of a checkpoint lies in vLLM's Beam.

vLLM's own way of loading weights into a running engine calls two loaders a tensor, in Python, and keeps copies until a
layer is complete: seconds for thousands of experts. A `Layout` names the memory of every tensor beforehand, so that an
update is one copy a tensor, in place; CUDA graphs read the same memory as before.

It repeats what vLLM's loaders know (`vllm/models/beam/nvidia`). So it must prove itself: what lies where it says must
be what the checkpoint, which vLLM's loaders have read, has under that name (`difference`).
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from beam_rl.model.checkpoint import HFCheckpoint
from beam_rl.model.config import BeamConfig
from beam_rl.model.tensors import FUSED, hf_tensors

EXPERT = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<projection>gate|up|down)_proj\.weight")
"""Name of one expert's matrix."""
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
"""Tensors below which vLLM adds rows."""
PLAIN_EXPERTS = ("TRITON", "BATCHED_TRITON")
"""MoE backends whose weights lie as a checkpoint's: w13_weight [E, 2I, H], gate above up, and w2_weight [E, H, I]."""


class Unmapped(Exception):
    """Why an engine's parameters cannot be written directly."""


@dataclass(frozen=True)
class Layout:
    """The memory of every tensor of a checkpoint in one engine that holds all of them, whole."""

    views: Mapping[str, Tensor]
    """Views of the parameters, by Hugging Face's per-expert names and in a checkpoint's shapes."""
    fused: Mapping[str, tuple[Tensor, tuple[str, ...]]]
    """Of a layer's experts in one tensor: its view, and the per-expert names that it stands for."""
    padding: tuple[Tensor, ...]
    """What no tensor covers: zero, and to be made so again after memory was taken away."""


def check_engine(vllm_config: object, model: nn.Module) -> None:
    """Refuse engines whose parameters are not a checkpoint's, cut or not.

    Raises:
        Unmapped: the engine is sharded or quantised, or its MoE kernel rearranges weights.
    """
    parallel = vllm_config.parallel_config  # type: ignore[attr-defined]
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            raise Unmapped(f"{name} is {size}")
    if parallel.enable_expert_parallel and parallel.data_parallel_size > 1:
        raise Unmapped("the experts are spread over data-parallel engines")
    if getattr(vllm_config, "quant_config", None) is not None:
        raise Unmapped("the engine is quantised")
    for name, module in model.named_modules():
        if hasattr(module, "w13_weight"):
            backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
            if (kind := getattr(backend, "name", None)) not in PLAIN_EXPERTS:
                raise Unmapped(f"{name} runs on the MoE backend {kind}, which may rearrange weights")


def layout(parameters: Mapping[str, Tensor], config: BeamConfig) -> Layout:
    """The layout of vLLM's native Beam with these parameters.

    Raises:
        Unmapped: a parameter that a tensor should lie in is missing or of another shape, or one has no tensor.
    """
    if config.head_dim is None:
        raise Unmapped("the model's configuration leaves head_dim open")
    views = {}
    experts: dict[tuple[str, str], list[str]] = defaultdict(list)
    covered: dict[str, int] = defaultdict(int)
    padding = []
    for name, shape in hf_tensors(config).items():
        parameter, view = _place(name, shape, parameters, config)
        if tuple(view.shape) != tuple(shape):
            raise Unmapped(f"{parameter} has no room of shape {list(shape)} for {name}")
        views[name] = view
        covered[parameter] += view.numel()
        if match := EXPERT.fullmatch(name):
            experts[match["experts"], "down" if match["projection"] == "down" else "gate_up"].append(name)
        elif name in VOCABULARY:
            rest = parameters[parameter].detach()[shape[0] :]
            if len(rest):
                padding.append(rest)
                covered[parameter] += rest.numel()
    for parameter, tensor in parameters.items():
        if covered[parameter] != tensor.numel():
            raise Unmapped(f"{parameter}: {covered[parameter]:,} of its {tensor.numel():,} elements are a checkpoint's")
    fused = {
        f"{prefix}.{kind}_proj": (parameters[_experts(prefix, kind)].detach(), tuple(names))
        for (prefix, kind), names in experts.items()
    }
    return Layout(views, fused, tuple(padding))


def _place(
    name: str, shape: tuple[int, ...], parameters: Mapping[str, Tensor], config: BeamConfig
) -> tuple[str, Tensor]:
    """Name of the parameter that a tensor lies in, and its view there (of another shape where there is no room)."""

    def of(parameter: str) -> Tensor:
        if parameter not in parameters:
            raise Unmapped(f"there is no {parameter}, where {name} would lie")
        return parameters[parameter].detach()

    if match := EXPERT.fullmatch(name):
        expert, projection = int(match["expert"]), match["projection"]
        parameter = _experts(match["experts"], projection)
        whole = of(parameter)
        if expert >= len(whole):
            raise Unmapped(f"{parameter} has {len(whole)} experts")
        start = shape[0] if projection == "up" else 0
        return parameter, whole[expert] if projection == "down" else whole[expert, start : start + shape[0]]
    if match := re.fullmatch(r"(.*\.self_attn\.)(q|k|v|gate)_proj\.weight", name):
        block, part = match[1], match[2]
        q, k = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        start = {"q": 0, "k": q, "v": q + k, "gate": q + 2 * k}[part]
        parameter = f"{block}qkv_gate_proj.weight"
        if parameter not in parameters:
            parameter = f"{block}{'output_gate' if part == 'gate' else 'qkv'}_proj.weight"
            start = 0 if part == "gate" else start
        return parameter, of(parameter)[start : start + shape[0]]
    if match := re.fullmatch(r"(.*\.mlp\.)(gate|up)_proj\.weight", name):
        parameter = f"{match[1]}gate_up_proj.weight"
        start = shape[0] if match[2] == "up" else 0
        return parameter, of(parameter)[start : start + shape[0]]
    return name, of(name)[: shape[0]]  # the embedding and the head have more rows than the vocabulary


def _experts(prefix: str, kind: str) -> str:
    """The parameter with a layer's down projections, or else the one with its gates and ups."""
    return f"{prefix}.routed_experts.{'w2' if kind == 'down' else 'w13'}_weight"


# Proof


def sampled(config: BeamConfig) -> Iterator[str]:
    """Names that the proof compares: outside the layers all, and of each kind of layer the first and the last one's.

    Of a layer's experts the first and the last.
    """
    kinds = list(zip(config.layer_types or (), config.mlp_layer_types or (), strict=True))
    layers = {index for kind in set(kinds) for index in (kinds.index(kind), len(kinds) - 1 - kinds[::-1].index(kind))}
    for name in hf_tensors(config):
        match = re.match(r"model\.layers\.(\d+)\.", name)
        if match and int(match[1]) not in layers:
            continue
        expert = EXPERT.fullmatch(name)
        if expert is None or int(expert["expert"]) in (0, config.num_experts - 1):
            yield name


def difference(found: Layout, config: BeamConfig, checkpoint: HFCheckpoint) -> str | None:
    """Name of a tensor that is not, bit for bit, where the layout says; None: all that were compared are."""
    shapes = hf_tensors(config)
    for name in sampled(config):
        view = found.views[name]
        expected = checkpoint.read(name, 0, 0, shapes[name][0])
        if not torch.equal(view.cpu(), expected.to(view.dtype)):
            return name
    return None


# Writing


class Writer:
    """Writes updates through a layout, and knows what an update has not brought."""

    def __init__(self, found: Layout) -> None:
        self.layout = found
        self._missing: set[str] = set()

    @torch.no_grad()
    def begin(self) -> None:
        """A new update, of all weights, begins."""
        self._missing = set(self.layout.views)
        for rows in self.layout.padding:
            rows.zero_()

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Write some tensors, under per-expert or fused names; returns the names. The copies are only enqueued.

        Raises:
            ValueError: a tensor is unknown or of another shape; nothing of this call was written.
        """
        found = []
        for name, tensor in weights:
            view, names = self._target(name)
            if view.shape != tensor.shape:
                raise ValueError(f"weight update: {name} has shape {list(tensor.shape)}, not {list(view.shape)}")
            found.append((view, tensor, name, names))
        found.sort(key=lambda each: (str(each[0].dtype), str(each[1].dtype)))
        for _, group in groupby(found, key=lambda each: (each[0].dtype, each[1].dtype)):
            views, tensors, *_ = zip(*group, strict=True)
            torch._foreach_copy_(list(views), list(tensors))
        for *_, names in found:
            self._missing.difference_update(names)
        return {name for _, _, name, _ in found}

    def _target(self, name: str) -> tuple[Tensor, tuple[str, ...]]:
        if name in self.layout.views:
            return self.layout.views[name], (name,)
        if name in self.layout.fused:
            return self.layout.fused[name]
        raise ValueError(f"weight update: the engine has no tensor {name}")

    def finish(self) -> None:
        """The update is over.

        Raises:
            RuntimeError: tensors did not come; names some.
        """
        if self._missing:
            shown = ", ".join(sorted(self._missing)[:5])
            more = f" and {len(self._missing) - 5} more" if len(self._missing) > 5 else ""
            raise RuntimeError(f"the model kept old values of {shown}{more} after a weight update")


def per_expert(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same tensors with the experts apart, under the names that checkpoints have; views of what comes in."""
    for name, tensor in weights:
        match = FUSED.fullmatch(name)
        if match is None:
            yield name, tensor
        else:
            yield from _apart(match["experts"], match["kind"], tensor)


def _apart(prefix: str, kind: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    for expert, whole in enumerate(tensor):
        if kind == "down":
            yield f"{prefix}.{expert}.down_proj.weight", whole
        else:
            for projection, part in zip(("gate", "up"), whole.chunk(2), strict=True):
                yield f"{prefix}.{expert}.{projection}_proj.weight", part
