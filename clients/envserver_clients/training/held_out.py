"""Held-out accuracy while a model trains, from the server's evaluations to held_out.jsonl.

In: the address of a server with `--evaluate.every`. Out: a line per evaluated policy version.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx
from envserver_records import EnvserverError
from envserver_records.files import replace_file, replacing
from envserver_records.servers import ServersClient
from envserver_records.urls import authorization

from .metrics import Line, read_lines

HELD_OUT: Final = "held_out.jsonl"
"""Name of the file, beside metrics.jsonl."""
_TICK_SECONDS: Final = 0.2


def write_held_out(server: str, path: Path, *, seconds: float = 300.0) -> None:
    """Evaluates the last policy version, waits for its end, and writes all evaluations.
    Raises EnvserverError: the last evaluation did not end within `seconds`.
    """
    until = time.monotonic() + seconds
    with ServersClient(server, timeout=30.0, headers=authorization()) as client:
        _wait(client, until)
        client.post("/v1/evaluations").raise_for_status()
        found = _wait(client, until)
    lines = [_line(one) for one in found if one["state"] == "complete"]
    replace_file(path, "".join(json.dumps(line) + "\n" for line in lines), sync=False)


def _wait(client: httpx.Client, until: float) -> list[dict[str, Any]]:
    while True:
        answer = client.get("/v1/evaluations").raise_for_status().json()
        if not answer["running"]:
            found: list[dict[str, Any]] = answer["evaluations"]
            return found
        if time.monotonic() > until:
            raise EnvserverError("The evaluation of held-out questions did not end.")
        time.sleep(_TICK_SECONDS)


def _line(evaluation: dict[str, Any]) -> Line:
    """Returns the numbers of an evaluation; `other_versions` counts rollouts of other weights."""
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


def draw_held_out(output: Path, tasks: Sequence[str], picture: Path) -> None:
    """Draws the held-out curves of all runs in `output`, and their train curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(tasks), 2, figsize=(9, 3.2 * len(tasks)), dpi=80, layout="constrained", squeeze=False
    )
    for (left, right), task in zip(axes, tasks, strict=True):
        for run in sorted(path.parent for path in output.glob(f"{task}-*/{HELD_OUT}")):
            name = run.name.removeprefix(f"{task}-")
            style = {"color": "gray", "linestyle": "--"} if name == "shuffled" else {}
            points = [(line["version"], line["reward_mean"]) for line in read_lines(run / HELD_OUT)]
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
    with replacing(picture, sync=False) as out:
        figure.savefig(out, format="png")
    pyplot.close(figure)
