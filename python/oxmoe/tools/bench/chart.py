"""Draws times over tokens as an SVG file, without any other package."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

Points = Sequence[tuple[int, float]]  # (tokens, microseconds)

_COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
_GREY = "#888888"
_LEFT, _TOP, _WIDTH, _HEIGHT, _BELOW = 80, 64, 560, 260, 60


def _ticks(least: float, most: float) -> list[float]:
    """Returns 1, 2 and 5 times powers of ten, from one that is not above `least` to one that is not below `most`."""
    steps = [
        factor * 10.0**power
        for power in range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
        for factor in (1, 2, 5)
    ]
    below = max(step for step in steps if step <= least * (1 + 1e-9))
    above = min(step for step in [*steps, 2 * steps[-1]] if step >= most * (1 - 1e-9))
    return [step for step in steps if below <= step <= above]


def _panel(title: str, series: Mapping[str, Points], top: int) -> list[str]:
    points = [point for line in series.values() for point in line]
    least, most = min(tokens for tokens, _ in points), max(tokens for tokens, _ in points)
    ticks = _ticks(min(us for _, us in points), max(us for _, us in points))

    def across(tokens: float) -> float:
        if least == most:
            return _LEFT + _WIDTH / 2
        return _LEFT + _WIDTH * math.log(tokens / least) / math.log(most / least)

    def down(us: float) -> float:
        span = math.log(ticks[-1] / ticks[0]) or 1.0
        return top + _TOP + _HEIGHT * (1 - math.log(us / ticks[0]) / span)

    bottom = top + _TOP + _HEIGHT
    parts = [f'<text x="12" y="{top + 20}" font-weight="bold">{escape(title)}</text>']
    for us in ticks:
        y = down(us)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + _WIDTH}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{us:g}</text>')
    for tokens in sorted({tokens for tokens, _ in points}):
        x = across(tokens)
        parts.append(f'<line x1="{x:.1f}" y1="{top + _TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#eeeeee"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tokens}</text>')
    parts.append(f'<text x="{_LEFT}" y="{bottom + 38}">tokens of a call; microseconds of a layer</text>')
    for number, (name, line) in enumerate(series.items()):
        floor = name == "floor"
        colour = _GREY if floor else _COLOURS[number % len(_COLOURS)]
        style = f'stroke="{colour}" stroke-width="2"' + (' stroke-dasharray="6 4"' if floor else "")
        places = [(across(tokens), down(us)) for tokens, us in sorted(line)]
        if len(places) > 1:
            parts.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" fill="none" {style}/>')
        if not floor or len(places) == 1:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in places]
        x = 16 + 150 * number
        parts.append(f'<line x1="{x}" y1="{top + 40}" x2="{x + 22}" y2="{top + 40}" {style}/>')
        parts.append(f'<text x="{x + 28}" y="{top + 44}">{escape(name)}</text>')
    return parts


def svg(panels: Mapping[str, Mapping[str, Points]]) -> str:
    """Draws one panel for each title, with a line for each name of its series. Both axes are logarithmic; "floor" is
    dashed."""
    step = _TOP + _HEIGHT + _BELOW
    names = max(len(series) for series in panels.values())
    width, height = max(_LEFT + _WIDTH + 40, 16 + 150 * names), step * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13" role="img" aria-label="{escape("; ".join(panels), {chr(34): "&quot;"})}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (title, series) in enumerate(panels.items()):
        parts += _panel(title, series, number * step)
    return "\n".join([*parts, "</svg>", ""])
