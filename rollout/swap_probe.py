"""Does the engine run the model that these weights are? A fixed prompt's log-probs say so."""

import math
import secrets
from dataclasses import dataclass
from typing import Any

FIRST = -(2**31)
"""The probe's priority: it goes before every waiting request, so that it measures at once."""
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.05}
"""Largest mean difference of log-probs, by the engine's dtype, where they are at most one on average."""


@dataclass(frozen=True)
class Probe:
    """A comparison."""

    mean: float
    max: float
    tolerance: float
    against: str
    """Whose numbers were expected."""

    @property
    def fits(self) -> bool:
        return self.mean <= self.tolerance  # false for NaN


def tolerance(dtype: str, expected: list[float]) -> float:
    """Largest mean difference from the expected log-probs that rounding explains.

    It grows with their size. A trained model finds a prompt of arbitrary tokens all but impossible (11 nats a token),
    and there rounding and the experts that it flips make differences of 0.3 nats, though both sides agree to 0.002 on
    text that the model knows. Wrong weights differ by the log-probs' own spread. Numbers that are not finite explain
    nothing.
    """
    size = -sum(expected) / len(expected)
    return TOLERANCE[dtype] * (min(max(1.0, size), 20.0) if math.isfinite(size) else 1.0)


async def measure(engine: Any, tokens: list[int]) -> list[float]:
    """Log-probs of the tokens after the first, by a running engine."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    prompt = {"prompt_token_ids": tokens}
    request = engine.generate(prompt, sampling, f"beam-probe-{secrets.token_hex(8)}", priority=FIRST)
    final = [output async for output in request][-1]
    return [at[token].logprob for at, token in zip(final.prompt_logprobs[1:], tokens[1:], strict=True)]


def compare(found: list[float], expected: list[float], tolerance: float, against: str) -> Probe:
    """Measured log-probs against those expected."""
    apart = [abs(one - other) for one, other in zip(found, expected, strict=True)]
    return Probe(sum(apart) / len(apart), max(apart), tolerance, against)
