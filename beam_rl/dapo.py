"""DAPO's own rules (arXiv 2503.14476): the overlong penalty and dynamic sampling. Pure logic, no Ray, no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from beam_rl.settings import OverlongSettings

OVERSAMPLING = 3
"""Most groups to generate at once, as a multiple of a full batch: the published 1,536 prompts for 512."""


def overlong_penalty(length: int, limit: int, settings: OverlongSettings | None) -> float:
    """What a response of `length` tokens loses: 0 up to limit - buffer, then linearly down to -factor at the limit.

    Added to the task's reward, whatever that is: of two responses with one verdict, the longer is never better.
    """
    if settings is None:
        return 0.0
    return min(-(length - (limit - settings.buffer)) / settings.buffer * settings.factor, 0.0)


def informative(accuracies: Sequence[float], tolerance: float) -> bool:
    """Whether a group has a learning signal: its best and worst accuracy differ by more than float noise.

    The standard deviation would not do: rounding makes it positive for equal values.
    """
    return max(accuracies) - min(accuracies) > tolerance


@dataclass(frozen=True)
class Selection:
    """The groups that a step trains on."""

    groups: list[str]
    """Group ids in training order."""
    updates: int
    """Mini-batches of equal size to cut them into; 0 means no optimizer update this step."""
    note: str | None
    """What to tell the user when dynamic sampling ran out; None when the batch was filled."""


@dataclass
class DynamicSampling:
    """Collects informative groups until a batch is full or `max_batches` generated batches are used up.

    It always ends with a batch that can be trained on or skipped, divided evenly: it never raises and never loses
    the run. `stride` is the smallest number of groups that splits over the data-parallel ranks.
    """

    wanted: int
    """Groups a full batch has."""
    updates: int
    """Mini-batches a full batch has; `wanted` is a multiple of it."""
    max_batches: int
    """Generated batches after which the step goes on with what there is."""
    on_exhausted: Literal["pad", "train_short", "skip"]
    stride: int = 1
    expected: float = 1.0
    """Share of informative groups to expect before any group is there."""
    batches: int = 0
    signal: list[str] = field(default_factory=list)
    """Informative groups so far, in the order they were generated."""
    silent: list[str] = field(default_factory=list)
    """Groups without signal, in the order they were generated."""

    def add(self, signal: Sequence[str], silent: Sequence[str]) -> Selection | None:
        """Take the groups of one generated batch; returns the step's groups, or None to generate more."""
        self.batches += 1
        self.signal += signal
        self.silent += silent
        if len(self.signal) >= self.wanted:
            return Selection(self.signal[: self.wanted], self.updates, None)
        if self.batches < self.max_batches:
            return None
        return self.exhausted()

    def exhausted(self) -> Selection:
        """What to train on when no batch may be generated any more."""
        found = len(self.signal)
        note = (
            f"dynamic sampling found {found} of {self.wanted} informative groups in {self.batches} batches "
            f"({len(self.silent)} groups all right or all wrong); "
        )
        padded = (self.signal + self.silent)[: self.wanted]
        if found == 0 or self.on_exhausted == "skip":
            return Selection(padded, 0, note + "no update this step")
        if self.on_exhausted == "pad":
            return Selection(padded, self.updates, note + "filled up with groups without signal")
        updates, size = short_split(found, self.updates, self.stride)
        if updates == 0:
            return Selection(padded, 0, note + "too few to divide; no update this step")
        kept = self.signal[: updates * size]
        return Selection(kept, updates, note + f"trained on {len(kept)} in {updates} mini-batches")

    def next_size(self) -> int:
        """Groups worth generating next: the missing ones by the share that is informative, and a tenth more."""
        seen = len(self.signal) + len(self.silent)
        missing = max(self.wanted - len(self.signal), 1)
        share = len(self.signal) / seen if seen else self.expected
        size = missing if share == 1 else math.ceil(1.1 * missing / max(share, 1 / OVERSAMPLING))
        size = min(size, OVERSAMPLING * self.wanted)
        return math.ceil(size / self.stride) * self.stride

    def share(self) -> float:
        """Share of the generated groups that were informative: what the next step may expect."""
        return len(self.signal) / (len(self.signal) + len(self.silent))


def short_split(groups: int, updates: int, stride: int) -> tuple[int, int]:
    """The most mini-batches (at most `updates`) of equal size, a multiple of `stride`, that `groups` groups allow.

    Returns (mini-batches, groups a mini-batch); (0, 0) where not even one is possible.
    """
    for count in range(updates, 0, -1):
        size = groups // count // stride * stride
        if size > 0:
            return count, size
    return 0, 0
