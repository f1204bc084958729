"""`make learn`: watch a model learn, on a laptop.

    python -m envserver_clients.learn --output out/learn [--task tool] [--minutes 10]
    python -m envserver_clients.learn --output out/learn --serve my_environment.yaml

Makes the tiny model (once), starts the local engine, `envserver serve` and the trainer of
`envserver_clients.grpo`, prints a line per step and draws the curve. Meanwhile the server evaluates
questions that training never asks (`held_out.jsonl`). All processes end with it: when the model has
learned enough, on Ctrl-C, and on errors. Processes that die are restarted, and the trainer
continues from its checkpoint; so does the same command with the same --output.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

import httpx
from envserver_records import EnvserverError
from envserver_records.files import replace_file
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from rich.console import Console

from envserver_clients.training.metrics import HELD_OUT, read_lines, write_held_out
from envserver_clients.training.settings import end_at_sigterm, end_with_parent, run_command

_CONFIGS: Final = Path(__file__).parent / "training"
_MANY: Final = ("sort", "tool")
"""Tasks with tens of thousands of questions, which another tiny model is made for."""
_OF_TRAINER: Final = (
    *("output", "wire", "seed", "minutes", "steps", "until_reward", "waste_patience", "groups"),
    *("group_size", "learning_rate", "kl_weight", "lora_rank", "device"),
)
"""Settings that the trainer has under the same names."""
_BARS: Final = "▁▂▃▄▅▆▇█"
_PICTURE_WIDTH: Final = 60


_TICK_SECONDS: Final = 0.2
_MOST_RESTARTS: Final = 5
_SECONDS_TO_END: Final = 20.0

Command = Callable[[], Sequence[str]]
"""Returns the arguments of a command; called for each start."""


class Children:
    """Runs processes that belong together: starts them in order, restarts them when they die.

    At its exit each is ended by its id in reverse order, even if the owner fails or is interrupted,
    and by the kernel if the owner is killed. `folder` gets their logs and `processes.json`, which
    has their ids.
    """

    def __init__(self, folder: Path, *, environment: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._variables = {**os.environ, **(environment or {})}
        self._commands: dict[str, tuple[Command, bool]] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._died: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._running.values()):
            _end(process)

    def start(
        self, name: str, command: Command, *, ready: str = "", ready_seconds: float = 120.0
    ) -> None:
        """Starts a process; its output goes to `NAME.log`, or to ours without `ready`.

        `ready`: address that answers 200 when the process is ready; "": do not wait. Raises
        EnvserverError: it died before, or took longer than `ready_seconds`.
        """
        self._commands[name] = (command, bool(ready))
        self._begin(name)
        until = time.monotonic() + ready_seconds
        while ready and not _answers(ready):
            if self._running[name].poll() is not None or time.monotonic() > until:
                raise EnvserverError(f"The {name} did not start.", hint=self._last_words(name))
            time.sleep(_TICK_SECONDS)

    def wait_for(self, name: str) -> int:
        """Waits until a process ends by itself; returns its exit status. Others that die meanwhile
        are restarted. Raises EnvserverError: a process died too often."""
        while True:
            for other, process in list(self._running.items()):
                status = process.poll()
                if status is None:
                    continue
                if other == name and status >= 0:
                    return status
                self._again(other, status)
            time.sleep(_TICK_SECONDS)

    def _again(self, name: str, status: int) -> None:
        self._died[name] = self._died.get(name, 0) + 1
        if self._died[name] > _MOST_RESTARTS:
            raise EnvserverError(
                f"The {name} died {self._died[name]} times (last: {status}).",
                hint=self._last_words(name),
            )
        self._begin(name)

    def _begin(self, name: str) -> None:
        command, has_log = self._commands[name]
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self._log(name).open("ab")) if has_log else None
            self._running[name] = subprocess.Popen(
                command(),
                stdout=log,
                stderr=log and subprocess.STDOUT,
                env=self._variables,
                start_new_session=True,  # Ctrl-C reaches only us, who end them in order
                preexec_fn=end_with_parent,
            )
        ids = {name: process.pid for name, process in self._running.items()}
        replace_file(self._folder / "processes.json", json.dumps(ids), sync=False)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _last_words(self, name: str) -> str:
        log = self._log(name)
        return log.read_text(errors="replace")[-1500:] if log.exists() else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _answers(address: str) -> bool:
    try:
        return httpx.get(address, timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False


class LearnSettings(BaseModel):
    """Makes a tiny model, trains it on tasks of a server, and shows how it learns."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    output: Path = Path("out/learn")
    """Folder for everything; an existing one is continued."""
    task: Literal["sort", "tool", "arithmetic", "kuhn"] = "sort"
    """sort: one answer per task; tool: several turns with a calculator; arithmetic: 124 sums, too
    few to generalise; kuhn: self-play in Kuhn poker, from a model of your own (`--model`)."""
    serve: Path | None = None
    """Settings file of `envserver serve` for an environment of your own, instead of `task`."""
    wire: Literal["native", "atropos"] = "native"
    """Protocol for groups."""
    model: Path | None = None
    """Folder of the initial model. Default: the tiny model, made once beside `output`."""
    device: str = "cpu"
    """Where engine and trainer compute: cpu, or cuda. The tiny model gains nothing on a GPU."""
    seed: int = 0
    """Seed of the task order and of the trainer."""
    minutes: PositiveFloat = 10.0
    """Time limit of the trainer."""
    steps: PositiveInt | None = None
    """Stop after this many steps. Default: no limit."""
    until_reward: float | None = 0.9
    """Stop when the mean reward of the last ten steps is at least this."""
    waste_patience: PositiveInt = 12
    """Stop with an error after so many batches in a row that teach nothing."""
    evaluate_every: NonNegativeInt | None = None
    """Evaluate the model on held-out questions every so many steps, and at the end; 0: never.
    Default: 20 for `sort` and `tool`, else 0."""
    held_out: PositiveInt = 200
    """Number of held-out questions, asked once each."""
    shuffle_rewards: bool = False
    """Shuffle the rewards within each group: a control run, which must not learn."""
    groups: PositiveInt = 12
    """Groups per batch."""
    group_size: int = Field(default=8, ge=2)
    """Rollouts per group."""
    learning_rate: PositiveFloat = 3e-4
    """Learning rate."""
    kl_weight: NonNegativeFloat = 0.0
    """Weight of the distance to the initial model."""
    lora_rank: NonNegativeInt = 0
    """Rank of a LoRA to train instead of all weights, with a higher --learning-rate; 0: train all
    weights."""


def learn(settings: LearnSettings, console: Console) -> int:
    """Runs until the trainer ends; returns its exit status, or 130 after Ctrl-C.

    Raises EnvserverError: a process did not start, or died too often.
    """
    model = settings.model or _tiny_model(settings, console)
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
            if _evaluate_every(settings) and status == 0:
                write_held_out(server, settings.output / HELD_OUT)
        except KeyboardInterrupt:
            console.print("Stopping; the same command continues from the last checkpoint.")
            status = 130
    _show(settings, console)
    return status


def _tiny_model(settings: LearnSettings, console: Console) -> Path:
    kind = "many" if _has_many(settings) else "sums"
    folder = settings.output.parent / ("tiny-many" if kind == "many" else "tiny")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another command may be making it
        if not (folder / "config.json").exists():
            console.print(f"Making a tiny model in {folder}: two minutes or less, once.")
            words = [sys.executable, "-m", "envserver", "models", "tiny", str(folder)]
            words += ["--tasks", kind]
            if subprocess.run(words, check=False).returncode:
                raise EnvserverError("The tiny model could not be made.")
    return folder


def _engine(settings: LearnSettings, model: Path, address: str) -> list[str]:
    """Starts with the trainer's last weights, also after a crash; adapters are transferred
    again."""
    words = [sys.executable, "-m", "envserver_local", "--port", _port(address)]
    words += ["--threads", "1", "--device", settings.device]
    if settings.lora_rank:
        return [*words, "--model", str(model), "--served-model-name", "base", "--enable-lora"]
    newest = _newest(settings.output / "weights") or model
    return [*words, "--model", str(newest), "--served-model-name", "policy"]


def _newest(folder: Path) -> Path | None:
    found = []
    for path in folder.glob("version-*"):
        if match := re.fullmatch(r"version-(\d+)(?:\.(\d+))?", path.name):
            found.append((int(match[1]), int(match[2] or 0), path))
    return max(found)[2] if found else None


def _server(settings: LearnSettings, model: Path, engine: str, address: str) -> list[str]:
    words = [sys.executable, "-m", "envserver", "serve"]
    words += ["--config", str(settings.serve or _CONFIGS / f"serve_{settings.task}.yaml")]
    words += ["--env.seed", str(settings.seed), "--env.group_size", str(settings.group_size)]
    name = "policy@{version}" if settings.lora_rank else "policy"
    words += ["--openai.base_url", f"{engine}/v1", "--openai.model_name", name]
    words += ["--tokens.tokenizer", str(model), "--port", _port(address)]
    if every := _evaluate_every(settings):
        words += ["--evaluate.every", str(every)]
        words += ["--evaluate.total_steps", str(settings.held_out), "--evaluate.group_size", "1"]
        # New weights wait for the end of an evaluation, so that it is of one version.
        words += ["--evaluate.hold_seconds", "60"]
    return [*words, "--store", str(settings.output / "store.db")]


def _trainer(settings: LearnSettings, model: Path, engine: str, server: str) -> list[str]:
    given: dict[str, Any] = {"server": server, "engine": engine, "model": model, "threads": 1}
    given |= {name: getattr(settings, name) for name in _OF_TRAINER}
    words = [sys.executable, "-m", "envserver_clients.grpo"]
    for name, value in given.items():
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return [*words, *(["--shuffle-rewards"] if settings.shuffle_rewards else [])]


def _has_many(settings: LearnSettings) -> bool:
    return settings.serve is None and settings.task in _MANY


def _evaluate_every(settings: LearnSettings) -> int:
    default = 20 if _has_many(settings) else 0
    return default if settings.evaluate_every is None else settings.evaluate_every


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _show(settings: LearnSettings, console: Console) -> None:
    path = settings.output / "metrics.jsonl"
    lines = [line for line in read_lines(path) if "reward_mean" in line]
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
    if held_out := list(read_lines(settings.output / HELD_OUT)):
        curve = ", ".join(f"{line['reward_mean']:.2f} ({line['version']})" for line in held_out)
        console.print(f"Held-out reward (version): {curve}", highlight=False)
    console.print(f"Curves: {settings.output / 'curves.png'}", highlight=False)


def _picture(rewards: Sequence[float]) -> str:
    width = min(_PICTURE_WIDTH, len(rewards))
    edges = [round(place * len(rewards) / width) for place in range(width + 1)]
    means = [sum(rewards[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    return "".join(_BARS[min(len(_BARS) - 1, int(mean * len(_BARS)))] for mean in means)


def main(arguments: Sequence[str] | None = None) -> int:
    signal.signal(signal.SIGTERM, end_at_sigterm)
    program = "python -m envserver_clients.learn"
    return run_command(LearnSettings, learn, arguments, program=program, hint="\n")


if __name__ == "__main__":
    sys.exit(main())
