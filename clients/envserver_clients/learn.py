"""`make learn`: a model learns before your eyes, on a laptop.

    python -m envserver_clients.learn --output out/learn [--task tool] [--minutes 10]

Makes the tiny model (once), starts the local engine, `envserver serve` and the trainer of
`envserver_clients.grpo`, shows a line a step, and draws the curve. Everything ends with it: when it
has learned enough, on Ctrl-C, and when something fails. What dies on the way is started again, and
the trainer goes on from its checkpoint; the same command with the same --output goes on, too.
"""

from __future__ import annotations

import itertools
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NoReturn

from envserver_records import EnvserverError
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from envserver_clients.training.children import Children
from envserver_clients.training.metrics import Line, read_lines
from envserver_clients.training.settings import from_flags

_CONFIGS: Final = Path(__file__).parent / "training"
_BARS: Final = "▁▂▃▄▅▆▇█"
_PICTURE_WIDTH: Final = 60


class Learn(BaseModel):
    """Makes a tiny model, serves tasks to it, trains it, shows how it learns."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    output: Path = Path("out/learn")
    """Folder of everything; there is one: it goes on."""
    task: Literal["arithmetic", "tool"] = "arithmetic"
    """arithmetic: one answer each; tool: with a calculator, several turns each."""
    wire: Literal["native", "atropos"] = "native"
    """How the trainer gets groups."""
    model: Path | None = None
    """Folder of a model to begin with; unset: the tiny model, made beside `output` once."""
    seed: int = 0
    """Of the order of tasks and of the trainer."""
    minutes: float = Field(default=10.0, gt=0)
    """The trainer's time."""
    steps: int | None = Field(default=None, ge=1)
    """Stop after so many; unset: no such limit."""
    until_reward: float | None = 0.9
    """Stop when the mean reward of the last ten steps is at least this."""
    shuffle_rewards: bool = False
    """Deal out rewards by chance: a control, which must learn nothing."""
    groups: int = Field(default=12, ge=1)
    """Groups in a batch."""
    group_size: int = Field(default=8, ge=2)
    """Rollouts in a group."""
    learning_rate: float = Field(default=3e-4, gt=0)
    """Of the trainer."""
    lora_rank: int = Field(default=0, ge=0)
    """A LoRA of this rank learns in place of all weights, for which --learning-rate should be
    higher; 0: none."""


def learn(settings: Learn, console: Console) -> int:
    """Runs until the trainer ends; its exit status, or 130 after Ctrl-C.

    Raises:
        EnvserverError: something did not start, or died too often.
    """
    model = settings.model or _tiny_model(settings.output.parent / "tiny", console)
    engine, server = f"http://127.0.0.1:{_free_port()}", f"http://127.0.0.1:{_free_port()}"
    with Children(settings.output, environment={"OMP_NUM_THREADS": "1"}) as children:
        children.start("engine", lambda: _engine(settings, model, engine), ready=f"{engine}/health")
        children.start(
            "server", lambda: _server(settings, model, engine, server), ready=f"{server}/readyz"
        )
        console.print(
            f"Engine {engine}, server {server}, logs in {settings.output}.", soft_wrap=True
        )
        children.start("trainer", lambda: _trainer(settings, model, engine, server))
        try:
            status = children.wait_for("trainer")
        except KeyboardInterrupt:
            console.print("Ending; the same command goes on from the last checkpoint.")
            status = 130
    _show(settings, console)
    return status


def _tiny_model(folder: Path, console: Console) -> Path:
    if not (folder / "config.json").exists():
        console.print(f"Making a tiny model in {folder}: about two minutes, once.")
        words = [sys.executable, "-m", "envserver", "models", "make-tiny", str(folder)]
        if subprocess.run(words, check=False).returncode:
            raise EnvserverError("The tiny model could not be made.")
    return folder


def _engine(settings: Learn, model: Path, address: str) -> list[str]:
    """The engine begins with the last weights that the trainer gave it, also after a crash;
    adapters it is given anew."""
    words = [sys.executable, "-m", "envserver.models.local", "--port", _port(address)]
    words += ["--threads", "1"]
    if settings.lora_rank:
        return [*words, "--model", str(model), "--served-model-name", "base", "--enable-lora"]
    newest = _newest(settings.output / "weights") or model
    return [*words, "--model", str(newest), "--served-model-name", "policy"]


def _newest(folder: Path) -> Path | None:
    """The weights of the highest version, written last where it was written again."""
    found = []
    for path in folder.glob("version-*"):
        if match := re.fullmatch(r"version-(\d+)(?:\.(\d+))?", path.name):
            found.append((int(match[1]), int(match[2] or 0), path))
    return max(found)[2] if found else None


def _server(settings: Learn, model: Path, engine: str, address: str) -> list[str]:
    words = [sys.executable, "-m", "envserver", "serve"]
    words += ["--config", str(_CONFIGS / f"serve_{settings.task}.yaml")]
    words += ["--env.seed", str(settings.seed), "--env.group_size", str(settings.group_size)]
    name = "policy@{version}" if settings.lora_rank else "policy"
    words += ["--openai.base_url", f"{engine}/v1", "--openai.model_name", name]
    words += ["--tokens.tokenizer", str(model), "--port", _port(address)]
    return [*words, "--store", str(settings.output / "store.db")]


def _trainer(settings: Learn, model: Path, engine: str, server: str) -> list[str]:
    given = {
        "server": server,
        "engine": engine,
        "model": model,
        "output": settings.output,
        "wire": settings.wire,
        "seed": settings.seed,
        "minutes": settings.minutes,
        "steps": settings.steps,
        "until-reward": settings.until_reward,
        "groups": settings.groups,
        "group-size": settings.group_size,
        "learning-rate": settings.learning_rate,
        "lora-rank": settings.lora_rank,
        "threads": 1,
    }
    words = [sys.executable, "-m", "envserver_clients.grpo"]
    for name, value in given.items():
        words += [] if value is None else [f"--{name}", str(value)]
    return [*words, *(["--shuffle-rewards"] if settings.shuffle_rewards else [])]


def _free_port() -> int:
    """The same for all restarts: what is started again is found where it was."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _show(settings: Learn, console: Console) -> None:
    lines = [line for line in read_lines(settings.output / "metrics.jsonl") if _has_reward(line)]
    if not lines:
        return
    rewards = [line["reward_mean"] for line in lines]
    ten = min(10, len(rewards))
    console.print(
        f"Mean reward: {sum(rewards[:ten]) / ten:.2f} in the first {ten} steps, "
        f"{sum(rewards[-ten:]) / ten:.2f} in the last, of {len(rewards)}.",
        highlight=False,
    )
    console.print(_picture(rewards), highlight=False)
    console.print(f"Curves: {settings.output / 'curves.png'}", highlight=False)


def _has_reward(line: Line) -> bool:
    return "reward_mean" in line


def _picture(rewards: Sequence[float]) -> str:
    """A bar for each part of the way."""
    width = min(_PICTURE_WIDTH, len(rewards))
    edges = [round(place * len(rewards) / width) for place in range(width + 1)]
    means = [sum(rewards[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    return "".join(_BARS[min(len(_BARS) - 1, int(mean * len(_BARS)))] for mean in means)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the trainer's exit status, 1 when something could not be started."""
    console = Console()
    signal.signal(signal.SIGTERM, _end)
    try:
        return learn(
            from_flags(Learn, arguments, program="python -m envserver_clients.learn"), console
        )
    except EnvserverError as error:
        console.print(f"[red]{error.message}[/]\n{error.hint}", highlight=False)
        return 1
    except KeyboardInterrupt:
        return 130


def _end(number: int, frame: object) -> NoReturn:
    """SIGTERM ends everything on its way out, as Ctrl-C does."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
