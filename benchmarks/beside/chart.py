"""The chart: a bar for each contender, as SVG without a library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, LEFT, RIGHT, LINE, TOP = 760, 210, 150, 24, 56


class Bar(NamedTuple):
    title: str
    value: float
    least: float
    most: float
    ours: bool


def chart(heading: str, below: str, bars: Sequence[Bar]) -> str:
    """Bars from the longest to the shortest, each with its spread as a thin line and its number."""
    longest = max(bar.most for bar in bars)
    scale = (WIDTH - LEFT - RIGHT) / longest
    height = TOP + LINE * len(bars) + 16
    size, font = f'viewBox="0 0 {WIDTH} {height}"', 'font-family="sans-serif" font-size="13"'
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="22" font-size="16" fill="#1a1a1a">{escape(heading)}</text>',
        f'<text x="12" y="41" fill="#666666">{escape(below)}</text>',
    ]
    for i, bar in enumerate(sorted(bars, key=lambda one: one.value, reverse=True)):
        y = TOP + LINE * i
        middle = y + 9
        width, color = max(1.0, bar.value * scale), "#c8452d" if bar.ours else "#a9b3bd"
        drawn += [
            f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end" fill="#1a1a1a">{escape(bar.title)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="18" fill="{color}"/>',
            f'<path d="M{LEFT + bar.least * scale:.1f} {middle}H{LEFT + bar.most * scale:.1f}" stroke="#1a1a1a"/>',
            f'<text x="{LEFT + bar.most * scale + 8:.1f}" y="{y + 14}" fill="#1a1a1a">{bar.value:,.0f}</text>',
        ]
    return "\n".join([*drawn, "</svg>\n"])
