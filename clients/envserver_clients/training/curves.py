"""Draws metrics.jsonl: `python -m envserver_clients.training.curves metrics.jsonl ... [-o PNG]`.

In: one or more files of metrics; several are drawn into the same axes, with their folders' names.
Out: a PNG with reward, distance from the sampling policy, staleness and length.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .metrics import Line, picture_of, read_lines

_PANELS = (
    ("reward_mean", "mean reward"),
    ("tokens_each", "trained tokens per trajectory"),
    ("kl_sampling", "KL from the sampling policy"),
    ("staleness_mean", "versions behind"),
)
_SMOOTH = 10


def draw(files: Sequence[Path], picture: Path, *, title: str = "") -> None:
    with picture_of(picture, 2, 2, figsize=(9, 5.5)) as (figure, axes):
        for number, file in enumerate(files):
            lines = list(read_lines(file))
            for panel, (key, label) in zip(axes.flat, _PANELS, strict=True):
                name = file.parent.name if len(files) > 1 else None
                _curve(panel, lines, key, name, f"C{number}")
                panel.set_title(label, fontsize=10)
        for panel in axes.flat:
            panel.set_xlabel("step", fontsize=8)
            panel.grid(alpha=0.3)
        axes.flat[0].set_ylim(0, 1)
        if len(files) > 1:
            axes.flat[0].legend(fontsize=8)
        if title:
            figure.suptitle(title, fontsize=11)


def _curve(panel: Any, lines: Sequence[Line], key: str, name: str | None, color: str) -> None:
    found = [(line["step"], value) for line in lines if (value := _value(line, key)) is not None]
    if not found:
        return
    steps, values = np.array(found, np.float64).T
    panel.plot(steps, values, color=color, alpha=0.3, linewidth=1)
    panel.plot(steps, _smoothed(values), color=color, linewidth=2, label=name)


def _value(line: Line, key: str) -> float | None:
    if key != "tokens_each":
        value: float | None = line.get(key)
        return value
    return line["tokens_trained"] / line["trajectories"] if line.get("trajectories") else None


def _smoothed(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The mean of each value and up to `_SMOOTH - 1` before it."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(0, ends - _SMOOTH)
    means: np.ndarray[Any, Any] = (sums[ends] - sums[begins]) / (ends - begins)
    return means


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m envserver_clients.training.curves", description=__doc__
    )
    parser.add_argument("files", nargs="+", type=Path, help="one or more metrics.jsonl")
    parser.add_argument("-o", "--output", type=Path, default=Path("curves.png"), help="picture")
    parser.add_argument("--title", default="", help="above it")
    given = parser.parse_args(arguments)
    draw(given.files, given.output, title=given.title)


if __name__ == "__main__":
    main()
