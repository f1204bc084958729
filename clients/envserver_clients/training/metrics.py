"""Writes the metrics of each step to metrics.jsonl, the console and trackers.

Invariant: metrics.jsonl has one line for each step of the last checkpoint, even after a killed
trainer restarts: lines of later steps are removed, because these steps are repeated.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, Self, TextIO

import httpx
from envserver_records import EnvserverError
from envserver_records.files import replace_file, replacing
from envserver_records.http_errors import authorization
from envserver_records.servers import ServersClient
from envserver_records.tasks import Json
from envserver_records.tracking import Tracker, numbers
from rich.console import Console

Line = dict[str, Any]
"""`step`, `version`, `group_ids` and numbers, which the README explains."""


class Writer(Protocol):
    def write(self, line: Line) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """Writes to several destinations, in order.

    `window`: steps over which `reward_recent` is the mean. `earlier`: rewards of steps before a
    restart.
    """

    def __init__(self, writers: list[Writer], *, window: int, earlier: list[float]) -> None:
        self._writers = writers
        self._recent = deque(earlier, maxlen=window)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.close()

    def write(self, line: Line) -> None:
        """Writes one step; adds `reward_recent`."""
        if "reward_mean" in line:
            self._recent.append(line["reward_mean"])
        line["reward_recent"] = self.recent
        for writer in self._writers:
            writer.write(line)

    @property
    def recent(self) -> float | None:
        """Mean reward of the last steps; None before the window is full."""
        if len(self._recent) < (self._recent.maxlen or 1):
            return None
        return sum(self._recent) / len(self._recent)


def read_lines(path: Path) -> Iterator[Line]:
    """Yields the lines of a metrics.jsonl, without a last line that a kill left incomplete."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for text in file:
            if text.endswith("\n"):
                yield json.loads(text)


class JsonLines:
    """Appends to metrics.jsonl; lines of steps after `step` are removed."""

    def __init__(self, path: Path, step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_lines(path) if line["step"] <= step]
        replace_file(path, "".join(_text(line) for line in kept), sync=False)
        self.kept = kept
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, line: Line) -> None:
        self._file.write(_text(line))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _text(line: Line) -> str:
    return json.dumps(line) + "\n"


class ConsoleLines:
    """Prints a short line per step, and the column names every 20 steps."""

    _COLUMNS = (
        ("step", "step", "{:.0f}"),
        ("reward", "reward_mean", "{:.3f}"),
        ("recent", "reward_recent", "{:.3f}"),
        ("loss", "loss", "{:+.4f}"),
        ("|grad|", "gradient_norm", "{:.3f}"),
        ("clipped", "clip_fraction", "{:.1%}"),
        ("KL", "kl_sampling", "{:.4f}"),
        ("differ", "mismatch_mean", "{:.4f}"),
        ("stale", "staleness_mean", "{:.1f}"),
        ("tokens", "tokens_trained", "{:.0f}"),
        ("wait s", "seconds_waiting", "{:.1f}"),
        ("learn s", "seconds_learning", "{:.1f}"),
        ("all s", "seconds", "{:.0f}"),
    )

    def __init__(self, console: Console) -> None:
        self._console = console
        self._written = 0

    def write(self, line: Line) -> None:
        if self._written % 20 == 0:
            self._print(name for name, _, _ in self._COLUMNS)
        self._print(_cell(line.get(key), form) for _, key, form in self._COLUMNS)
        self._written += 1

    def _print(self, cells: Iterator[str]) -> None:
        text = " ".join(f"{cell:>8}" for cell in cells)
        self._console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        return


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


class Tracked:
    def __init__(self, tracker: Tracker, settings: Json) -> None:
        self._tracker = tracker
        tracker.config(settings)

    def write(self, line: Line) -> None:
        values = numbers(line)
        step = int(values.pop("step"))
        self._tracker.scalars(step, values)

    def close(self) -> None:
        self._tracker.close()


HELD_OUT: Final = "held_out.jsonl"
"""Name of the file, beside metrics.jsonl."""
_TICK_SECONDS: Final = 0.2
_HELD_OUT_SECONDS: Final = 300.0


def write_held_out(server: str, path: Path) -> None:
    """Evaluates the last policy version, waits for its end, and writes all evaluations.

    Raises EnvserverError: the last evaluation did not end within five minutes.
    """
    until = time.monotonic() + _HELD_OUT_SECONDS
    with ServersClient(server, timeout=30.0, headers=authorization()) as client:
        _wait(client, until)
        client.post("/v1/evaluations").raise_for_status()
        found = _wait(client, until)
    lines = [_line(run) for run in found if run["state"] == "complete"]
    replace_file(path, "".join(json.dumps(line) + "\n" for line in lines), sync=False)


def _wait(client: httpx.Client, until: float) -> list[Json]:
    while True:
        answer = client.get("/v1/evaluations").raise_for_status().json()
        if not answer["running"]:
            found: list[Json] = answer["evaluations"]
            return found
        if time.monotonic() > until:
            raise EnvserverError("The evaluation of held-out questions did not end.")
        time.sleep(_TICK_SECONDS)


def _line(evaluation: Json) -> Line:
    """`other_versions` counts rollouts of other weights."""
    rewards = [
        value for name, value in evaluation["results"].items() if name.endswith("/mean_reward")
    ]
    return {
        "version": evaluation["version"],
        "reward_mean": sum(rewards) / len(rewards),
        "rollouts": evaluation["rollouts"],
        "other_versions": evaluation["other_versions"],
        "sampled_by": evaluation["sampled_by"],
        "seconds": round(evaluation["ended_at"] - evaluation["began_at"], 1),
    }


@contextmanager
def picture_of(path: Path, rows: int, columns: int, **settings: Any) -> Iterator[tuple[Any, Any]]:
    """Yields a figure and its axes; saved as a PNG that replaces `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, dpi=80, layout="constrained", **settings)
    yield figure, axes
    with replacing(path, sync=False) as out:
        figure.savefig(out, format="png")
    pyplot.close(figure)


def draw_held_out(output: Path, tasks: Sequence[str], picture: Path) -> None:
    size = (9, 3.2 * len(tasks))
    with picture_of(picture, len(tasks), 2, figsize=size, squeeze=False) as (_, axes):
        for (left, right), task in zip(axes, tasks, strict=True):
            for run in sorted(path.parent for path in output.glob(f"{task}-*/{HELD_OUT}")):
                name = run.name.removeprefix(f"{task}-")
                style = {"color": "gray", "linestyle": "--"} if name == "shuffled" else {}
                points = [
                    (line["version"], line["reward_mean"]) for line in read_lines(run / HELD_OUT)
                ]
                left.plot(*zip(*points, strict=True), marker="o", label=name, **style)
                steps = [(x["step"], x["reward_mean"]) for x in read_lines(run / "metrics.jsonl")]
                right.plot(*zip(*steps, strict=True), **style)
            left.set_title(f"{task}: held-out questions, sampled", fontsize=10)
            right.set_title(f"{task}: training questions", fontsize=10)
            left.legend(fontsize=7)
            for panel in (left, right):
                panel.set_ylim(0, 1)
                panel.set_xlabel("step", fontsize=8)
                panel.grid(alpha=0.3)
