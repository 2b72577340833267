"""Charts as inline SVG: no library, no network; colours and hover come from the page that holds them."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 640.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 12.0, 10.0, 30.0

Value = float | None


@dataclass(frozen=True)
class Series:
    """One quantity over the steps; None and non-finite values leave a gap."""

    name: str
    values: Sequence[Value]
    colour: int
    """Number of a colour of the page's palette, 1 to 6."""
    style: Literal["line", "points"] = "line"
    errors: Sequence[Value] | None = None
    """Half lengths of the error bars."""


@dataclass(frozen=True)
class Limit:
    """A horizontal line not to be crossed."""

    name: str
    value: float


def number(value: float) -> str:
    """Three significant digits, no exponent where it reads well without."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if 1e-4 <= abs(value) < 1e5:
        return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return f"{value:.2e}"


def percent(value: float) -> str:
    """A share as per cent, one decimal."""
    return f"{100 * value:.1f} %"


def line_chart(
    label: str,
    x: Sequence[int],
    series: Sequence[Series],
    *,
    write: Callable[[float], str] = number,
    log: bool = False,
    limit: Limit | None = None,
    bounds: tuple[float | None, float | None] = (None, None),
    resumed_after: Sequence[int] = (),
) -> str:
    """Lines or points over steps, with a legend; `bounds` fixes an end of the y axis, `log` makes it logarithmic."""
    drawn = [_finite(one.values, positive=log) for one in series]
    spread = [
        end
        for values, one in zip(drawn, series, strict=True)
        for value, error in zip(values, one.errors or [0.0] * len(values), strict=True)
        if value is not None
        for end in (value - (error or 0.0), value + (error or 0.0))
    ]
    if not spread:
        return _empty()
    if limit is not None:
        spread.append(limit.value)
    low = min(spread) if bounds[0] is None else bounds[0]
    high = max(spread) if bounds[1] is None else max(bounds[1], *spread)
    axis = _log_axis(low, high) if log else _linear_axis(low, high)
    to_x = _x_scale(x)
    parts = [_grid(axis, write), _x_axis(x, to_x), _resumes(resumed_after, x, to_x)]
    if limit is not None:
        y = axis.place(limit.value)
        parts.append(f'<path class="limit" d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}"/>')
    for values, one in zip(drawn, series, strict=True):
        parts.append(_draw(one, values, [to_x(step) for step in x], axis))
    hover = [
        [[one.name, write(value) + (f" ± {write(error)}" if error else "")]
         for one, values in zip(series, drawn, strict=True)
         if (value := values[index]) is not None
         for error in [one.errors[index] if one.errors else None]]
        for index in range(len(x))
    ]  # fmt: skip
    entries = [(one.name, f"key{' dot' if one.style == 'points' else ''} c{one.colour}") for one in series]
    if limit is not None:
        entries.append((f"{limit.name} {limit.value:g}", "key dash"))
    return _figure(label, "".join(parts), entries, x, to_x, hover)


def stacked_chart(
    label: str,
    x: Sequence[int],
    layers: Sequence[Series],
    *,
    write: Callable[[float], str] = number,
    resumed_after: Sequence[int] = (),
) -> str:
    """One bar a step, layers on top of each other."""
    if not x or not layers:
        return _empty()
    stacks = [[value or 0.0 for value in _finite(layer.values)] for layer in layers]
    axis = _linear_axis(0.0, max(sum(column) for column in zip(*stacks, strict=True)))
    to_x = _x_scale(x, pad=0.5)
    bar = max(1.0, 0.8 * (WIDTH - LEFT - RIGHT) / (x[-1] - x[0] + 1))
    parts = [_grid(axis, write), _x_axis(x, to_x), _resumes(resumed_after, x, to_x)]
    base = [0.0] * len(x)
    for layer, heights in zip(layers, stacks, strict=True):
        boxes = []
        for index, height in enumerate(heights):
            top, bottom = axis.place(base[index] + height), axis.place(base[index])
            boxes.append(f"M{to_x(x[index]) - bar / 2:.1f},{bottom:.1f}v{top - bottom:.2f}h{bar:.1f}V{bottom:.1f}z")
            base[index] += height
        parts.append(f'<path class="fill c{layer.colour}" d="{"".join(boxes)}"/>')
    hover = [
        [[layer.name, write(heights[index])] for layer, heights in zip(layers, stacks, strict=True)]
        + [["total", write(base[index])]]
        for index in range(len(x))
    ]
    entries = [(layer.name, f"key box c{layer.colour}") for layer in layers]
    return _figure(label, "".join(parts), entries, x, to_x, hover)


@dataclass(frozen=True)
class _Axis:
    ticks: list[float]
    place: Callable[[float], float]
    """Value → y coordinate."""


def _linear_axis(low: float, high: float) -> _Axis:
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = low - (abs(low) or 1.0) * 0.1, high + (abs(high) or 1.0) * 0.1
    rough = (high - low) / 4
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [index * step for index in range(first, last + 1)]
    return _Axis(ticks, _vertical(ticks[0], ticks[-1], float))


def _log_axis(low: float, high: float) -> _Axis:
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    every = math.ceil((last - first) / 6)
    ticks = [10.0**power for power in range(first, last + 1, every)]
    return _Axis(ticks, _vertical(10.0**first, 10.0**last, math.log10))


def _vertical(low: float, high: float, transform: Callable[[float], float]) -> Callable[[float], float]:
    bottom, span = transform(low), transform(high) - transform(low)

    def place(value: float) -> float:
        share = min(1.0, max(0.0, (transform(value) - bottom) / span)) if value > 0 or transform is float else 0.0
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    return place


def _x_scale(x: Sequence[int], pad: float = 0.0) -> Callable[[float], float]:
    first, last = x[0] - pad, x[-1] + pad
    if last == first:
        first, last = first - 1, last + 1
    return lambda step: LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)


def _finite(values: Sequence[Value], *, positive: bool = False) -> list[Value]:
    return [
        value if value is not None and math.isfinite(value) and (value > 0 or not positive) else None
        for value in values
    ]


def _grid(axis: _Axis, write: Callable[[float], str]) -> str:
    lines = "".join(f"M{LEFT},{axis.place(tick):.1f}H{WIDTH - RIGHT}" for tick in axis.ticks)
    labels = "".join(
        f'<text x="{LEFT - 8}" y="{axis.place(tick) + 4:.1f}" text-anchor="end">{_tick(tick, write)}</text>'
        for tick in axis.ticks
    )
    return f'<path class="grid" d="{lines}"/>{labels}'


def _tick(value: float, write: Callable[[float], str]) -> str:
    if write is percent:
        return f"{round(100 * value, 1):g} %"
    return f"{round(value, 10):,g}" if 1e-5 <= abs(value) < 1e6 or value == 0 else f"{value:.0e}"


def _x_axis(x: Sequence[int], to_x: Callable[[float], float]) -> str:
    every = max(1, math.ceil((x[-1] - x[0]) / 8))
    every = next(nice for power in range(9) for nice in (10**power, 2 * 10**power, 5 * 10**power) if nice >= every)
    ticks = range(math.ceil(x[0] / every) * every, x[-1] + 1, every)
    labels = "".join(
        f'<text x="{to_x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick}</text>' for tick in ticks
    )
    return f'<path class="axis" d="M{LEFT},{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>{labels}'


def _resumes(resumed_after: Sequence[int], x: Sequence[int], to_x: Callable[[float], float]) -> str:
    inside = [step + 0.5 for step in resumed_after if x[0] <= step + 0.5 <= x[-1]]
    lines = "".join(f"M{to_x(step):.1f},{TOP}V{HEIGHT - BOTTOM}" for step in inside)
    return f'<path class="resume" d="{lines}"><title>resumed here</title></path>' if inside else ""


def _draw(one: Series, values: list[Value], px: list[float], axis: _Axis) -> str:
    parts = []
    if one.style == "line":
        path, pen_down = [], False
        for left, value in zip(px, values, strict=True):
            if value is not None:
                path.append(f"{'L' if pen_down else 'M'}{left:.1f},{axis.place(value):.1f}")
            pen_down = value is not None
        parts.append(f'<path class="line c{one.colour}" d="{"".join(path)}"/>')
    known = [(index, value) for index, value in enumerate(values) if value is not None]
    if one.errors is not None:
        bars = "".join(
            f"M{px[index]:.1f},{axis.place(value - error):.1f}V{axis.place(value + error):.1f}"
            for index, value in known
            if (error := one.errors[index])
        )
        parts.append(f'<path class="error c{one.colour}" d="{bars}"/>')
    if one.style == "points" or one.errors is not None or len(known) == 1:
        parts += [
            f'<circle class="fill c{one.colour}" cx="{px[index]:.1f}" cy="{axis.place(value):.1f}" r="3.5"/>'
            for index, value in known
        ]
    return "".join(parts)


def _figure(
    label: str,
    body: str,
    entries: list[tuple[str, str]],
    x: Sequence[int],
    to_x: Callable[[float], float],
    hover: list[list[list[str]]],
) -> str:
    data = escape(json.dumps([[step, round(to_x(step), 1), rows] for step, rows in zip(x, hover, strict=True)]))
    legend = "".join(f'<span class="{style}">{escape(name)}</span>' for name, style in entries)
    return (
        f'<div class="legend">{legend}</div>'
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="{escape(label)}" data-points="{data}">'
        f'{body}<path class="cursor" d=""/></svg>'
    )


def _empty() -> str:
    return '<p class="empty">nothing recorded yet</p>'
