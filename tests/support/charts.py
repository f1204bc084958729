"""Draws small SVG charts, in the light or dark colours of the reader (charts.css), from the tables
of Markdown pages, so that a chart never differs from what was recorded.
"""

import itertools
import math
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path

_STYLE = Path(__file__).with_name("charts.css")
_NICE = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)
"""Ends of an axis with four equal steps."""


Lines = dict[str, list[list[tuple[float, float]]]]


def table(page: str, head: str) -> list[list[str]]:
    """The cells of the first table whose first line begins with `head`."""
    lines = page[page.index(f"\n| {head}") :].splitlines()[3:]
    kept = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in kept]


def number(cell: str) -> float:
    """The first number of a cell such as `1,024 (2,000)`."""
    return float(cell.split()[0].replace(",", ""))


def cpu_bars(compared: str) -> str:
    """CPU of each case in docs/benchmarks.md, ours and the peers'."""
    rows = [row for row in table(compared, " | unit") if "CPU" in row[1]]
    parts, y = [], 12
    for case, those in itertools.groupby(rows, key=lambda row: row[0]):
        peers = list(those)
        bars = [("envserver", peers[0][2], "")]
        bars += [(peer, theirs, f", × {times}") for *_, peer, theirs, times in peers]
        most = max(number(value) for _, value, _ in bars) or 1.0
        parts.append(_text(16, y + 10, case, "strong"))
        for who, value, times in bars:
            y, wide = y + 20, 400 * number(value) / most
            kind, size = f"c{int(bool(times))}", f'width="{wide:.1f}" height="14" rx="2"'
            parts.append(f'<rect class="{kind}" x="150" y="{y}" {size}/>')
            parts.append(_text(142, y + 11, who, "end"))
            parts.append(_text(158 + wide, y + 11, f"{value.split()[0]} {peers[0][1]}{times}"))
        y += 32
    return _svg(720, y - 4, parts)


def learning_curves(learned: str) -> str:
    """Held-out rewards of all recorded seeds and of the control, by task."""
    panels: dict[str, Lines] = {}
    for name, *rewards in table(learned, "run | held out"):
        if found := re.fullmatch(r"(\w+), (seed|shuffled).*", name):
            label = "five seeds" if found[2] == "seed" else "control: shuffled rewards"
            points = [(10.0 * n, float(value)) for n, value in enumerate(rewards[:5]) if value]
            title = f"Reward of held-out questions: {found[1]}"
            panels.setdefault(title, {}).setdefault(label, []).append(points)
    return _curves(panels, "steps")


def long_curves(measured: str) -> str:
    """CPU and memory of a long conversation, by turn."""
    titles = ("CPU of the proxy for a call, ms", "Memory of the proxy for a conversation, MB")
    rows = [list(map(number, row)) for row in table(measured, "turns | tokens | CPU ms")]
    panels = {
        title: {"": [[(row[0], row[at]) for row in rows]]} for at, title in enumerate(titles, 2)
    }
    return _curves(panels, "turns, each of 1,164 tokens")


def _curves(panels: Mapping[str, Lines], below: str) -> str:
    parts, top, wide, high = [], 58, 320, 160
    for left, (title, lines) in zip((44, 424), panels.items(), strict=True):
        points = [point for those in lines.values() for line in those for point in line]
        end, most = max(x for x, _ in points), _nice(max(y for _, y in points))
        parts += [
            _text(left - 28, 22, title, "strong"),
            _text(left + 160, 254, below, "middle dim"),
        ]
        for share in (0, 0.25, 0.5, 0.75, 1):
            x, y = left + wide * share, top + high * (1 - share)
            parts.append(f'<path class="grid" d="M{left},{y:.0f}h{wide}"/>')
            parts.append(_text(left - 6, y + 4, f"{most * share:g}", "end dim"))
            parts.append(_text(x, top + high + 18, f"{end * share:g}", "middle dim"))
        for kind, (label, those) in enumerate(lines.items()):
            parts.append(_text(left + 150 * kind, 42, label, f"c{kind}"))
            for line in those:
                at = [(left + wide * x / end, top + high * (1 - y / most)) for x, y in line]
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
                parts.append(f'<polyline class="line c{kind}" points="{path}"/>')
    return _svg(760, 264, parts)


def _nice(value: float) -> float:
    power: float = 10 ** math.floor(math.log10(value))
    return next(one * power for one in _NICE if one * power >= value)


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{escape(words)}</text>'


def _svg(width: int, height: int, parts: list[str]) -> str:
    size = f'width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}">'
    style = f"<style>\n{_STYLE.read_text()}</style>"
    return "\n".join([head, style, f'<rect class="back" {size}/>', *parts, "</svg>\n"])
