"""A packed micro batch: sequences end to end, their positions, and the expert routes that belong to them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from beam_rl.model import numerics

BUCKET = 16
"""Sequences are padded to a multiple of this many tokens inside attention, so that few shapes occur."""

HIDDEN = -65504.0
"""What a mask adds to the score of a key that is not seen: PyTorch's value, as cuDNN has trouble with infinity."""


@dataclass(frozen=True)
class AttentionPlan:
    """How packed tokens are laid out as rectangles for attention, and back.

    A bucket holds the sequences of one padded length. Padding stands behind a sequence, so a causal query never sees
    it, and its rows repeat the sequence's last token.
    """

    shapes: tuple[tuple[int, int], ...]
    """(sequences, padded length) of every bucket."""
    gather: Tensor
    """int64 [padded tokens], bucket after bucket: the packed token at each place."""
    restore: Tensor
    """int64 [tokens]: the place of each packed token."""

    @property
    def identity(self) -> bool:
        """Whether the tokens lie in one rectangle as they are: nothing has to be moved."""
        return len(self.shapes) == 1 and len(self.gather) == len(self.restore)


@dataclass
class PackedBatch(PackedSeqParams):
    """One micro batch in Megatron's packed ("thd") format.

    It travels as `packed_seq_params` through schedules, pipeline stages and activation recompute, so everything that
    belongs to the micro batch and not to the model is carried here: any number may be in flight.
    """

    lengths: tuple[int, ...] = ()
    """Tokens of every sequence, over all context-parallel ranks."""
    routes: Tensor | None = None
    """uint8 or int16 [tokens, layers, topk]: experts to use instead of the router's choice, by absolute layer.

    Rows are this context-parallel rank's tokens, before sequence parallelism splits them.
    """
    captured: Tensor | None = None
    """bool [tokens]: rows of `routes` that hold; elsewhere the router chooses. None: all of them."""
    record: bool = False
    """Keep the routes used in `recorded`."""
    recorded: dict[int, Tensor] = field(default_factory=dict)
    """int64 [tokens, topk] by absolute layer, of the layers on this pipeline stage."""
    _stretch: Tensor | None = None

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        routes: Tensor | None = None,
        captured: Tensor | None = None,
        record: bool = False,
    ) -> "PackedBatch":
        """Describe sequences of the given lengths (each ≥ 1), packed in this order.

        Padding up to a wanted number of tokens is one more sequence, whose results the caller ignores.
        """
        if min(lengths, default=0) < 1:
            raise ValueError(f"a packed batch needs sequences of at least one token, got lengths {list(lengths)}")
        boundaries = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device)
        boundaries[1:] = torch.tensor(lengths, device=device).cumsum(0)
        longest = max(lengths)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=tuple(lengths),
            routes=routes,
            captured=captured,
            record=record,
        )

    @cached_property
    def positions(self) -> Tensor:
        """int64 [tokens over all context-parallel ranks]: each token's position inside its sequence."""
        starts = self.cu_seqlens_q[:-1].long()
        sizes = self.cu_seqlens_q.diff().long()
        return torch.arange(sum(self.lengths), device=starts.device) - starts.repeat_interleave(sizes)

    @cached_property
    def documents(self) -> Tensor:
        """int64 [tokens over all context-parallel ranks]: index of each token's sequence."""
        sizes = self.cu_seqlens_q.diff().long()
        return torch.arange(len(self.lengths), device=sizes.device).repeat_interleave(sizes)

    @cached_property
    def plan(self) -> AttentionPlan:
        """Rectangles for attention; shared by all layers."""
        device = self.cu_seqlens_q.device
        sizes = torch.tensor(self.lengths)  # on the CPU: what follows asks for values, and a GPU would wait for them
        starts = sizes.cumsum(0) - sizes
        padded = (sizes + BUCKET - 1) // BUCKET * BUCKET
        shapes: list[tuple[int, int]] = []
        gather: list[Tensor] = []
        restore = torch.empty(sum(self.lengths), dtype=torch.int64)
        offset = 0
        for width in sorted({(n + BUCKET - 1) // BUCKET * BUCKET for n in self.lengths}):
            members = (padded == width).nonzero()[:, 0]
            width = min(width, int(sizes[members].max()))
            within = torch.arange(width)
            real = within < sizes[members, None]  # [sequences, width]
            tokens = starts[members, None] + torch.minimum(within, sizes[members, None] - 1)
            places = offset + torch.arange(tokens.numel()).view_as(tokens)
            restore[tokens[real]] = places[real]
            shapes.append((len(members), width))
            gather.append(tokens.flatten())
            offset += tokens.numel()
        return AttentionPlan(tuple(shapes), torch.cat(gather).to(device), restore.to(device))

    def rope(self, theta: float, head_dim: int, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the tokens (of those at index, if given), computed once a micro batch."""
        if theta not in self._rope:
            positions = self.positions if index is None else self.positions[index]
            inv_freq = numerics.rope_inverse_frequencies(head_dim, theta, positions.device)
            self._rope[theta] = numerics.rope_cos_sin(positions, inv_freq)
        return self._rope[theta]

    def stretch(self, index: Tensor | None = None) -> Tensor:
        """SSMax's factors of the tokens (of those at index, if given), computed once a micro batch."""
        if self._stretch is None:
            self._stretch = numerics.ssmax_scale(self.positions if index is None else self.positions[index])
        return self._stretch

    def place(self, positions: dict[float | None, tuple[Tensor, ...]]) -> None:
        """Take what `rope` gives for each theta, and under None what `stretch` gives, from somebody else."""
        self._rope.update({theta: pair for theta, pair in positions.items() if theta is not None})  # type: ignore[misc]
        self._stretch = positions[None][0] if None in positions else None

    def window_mask(self, sequences: int, width: int, window: int, dtype: torch.dtype) -> Tensor:
        """What `attention.windowed_attention` adds to scores, [sequences * blocks, 1, window, 2 * window].

        Computed once a micro batch, and in dtype: PyTorch would translate a bool mask anew in every layer.
        """
        key = (sequences, width, window, dtype)
        if key not in self._window_masks:
            device = self.cu_seqlens_q.device
            distance = torch.arange(window, device=device)[:, None] - torch.arange(-window, window, device=device)
            hidden = (distance < 0) | (distance >= window)
            mask = torch.zeros(sequences, -(-width // window), *hidden.shape, dtype=dtype, device=device)
            mask.masked_fill_(hidden, HIDDEN)
            mask[:, 0, :, :window] = HIDDEN  # there is no block before the first
            self._window_masks[key] = mask.view(-1, 1, *hidden.shape)
        return self._window_masks[key]

    @cached_property
    def _window_masks(self) -> dict[tuple[int, int, int, torch.dtype], Tensor]:
        return {}

    @cached_property
    def _rope(self) -> dict[float, tuple[Tensor, Tensor]]:
        return {}

    def layer_routes(self, layer: int) -> tuple[Tensor, Tensor | None] | None:
        """Routes to replay in a layer, [tokens, topk], and the rows that hold; None: no replay."""
        return None if self.routes is None else (self.routes[:, layer], self.captured)
