"""`envserver sweep`: merges, evaluates and draws, one alpha after the other.

    OUT/models/alpha-A        the merged models (alpha 0 is the base itself)
    OUT/evaluations/alpha-A   folders of `evaluate`
    OUT/sweep.json, sweep.svg what was found so far; written again after each alpha

What holds: an alpha whose evaluation is complete is neither merged nor evaluated again; a folder
belongs to one sweep.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from envserver_records.errors import ConfigError, InputError

from ..evaluation.folders import View, read_folder, read_run_file
from ..evaluation.report import Report
from ..evaluation.sweep import Point, Sweep, drawn, table_of
from ..export.unified import write_json
from ..running.evaluating import Evaluation, Member, evaluate_members
from ..running.evaluation_folder import write_text
from ..running.python_api import EVALUATION_DEFAULTS, choice_of
from .console import Console
from .evaluate_command import Progress, show_tables
from .evaluate_members import read_members
from .logs import show_logs
from .loop import run_loop
from .publish_command import results_of
from .signals import SignalStop
from .specs.sweep_command import COMMAND, SweepSettings

_FILE = "sweep.json"
_PICTURE = "sweep.svg"


def run(argv: list[str]) -> int:
    """Runs the command; returns 0 if all alphas were evaluated, 130 if it was stopped early."""
    settings = read_members(COMMAND, argv, defaults=EVALUATION_DEFAULTS)[0].settings
    show_logs(settings)
    console = Console(stderr=True)
    work = _Work(settings, argv, console)
    for alpha in settings.alpha:
        if not work.evaluate(alpha):
            console.print(f"Stopped early; the same command continues in {work.folder}.")
            return 130
    show_tables(console, [table_of(work.sweep)], work.notes())
    print(work.folder / _PICTURE)
    return 0


class _Work:
    """A sweep in its folder.

    Args:
        argv: the command line; the evaluations' settings are read from it.
    """

    def __init__(self, settings: SweepSettings, argv: list[str], console: Console) -> None:
        _check(settings)
        assert settings.out is not None
        self.folder = settings.out
        self.sweep = self._opened(settings)
        self._settings = settings
        self._argv = argv
        self._console = console

    def evaluate(self, alpha: float) -> bool:
        """Evaluates the model of an alpha; returns False if it was stopped."""
        folder = self.folder / "evaluations" / _name(alpha)
        asked = self._asked()
        known = next((one for one in self.sweep.points if one.alpha == alpha), None)
        if known is None or known.asked != asked:
            model = self._model(alpha)
            self._console.print(f"alpha {alpha:g}", style="bold", highlight=False)
            done = self._evaluated(model, folder)
            if done.stopped:
                return False
            self._note(Point.of(alpha, str(model), asked, _reports(folder)), model)
        return True

    def notes(self) -> list[str]:
        """Returns how to read the table."""
        best = self.sweep.best()
        told = [f"Best: alpha {best.alpha:g}, {best.model}"] if best else []
        return [*told, "The best alpha was chosen by these tasks: measure its model on others."]

    def _opened(self, settings: SweepSettings) -> Sweep:
        """Returns the sweep in the folder, new or begun earlier; claims the folder."""
        wanted = Sweep(
            base=_described(settings.base),
            tuned=_described(settings.tuned),
            start=_described(settings.start) if settings.start else {},
        )
        path = self.folder / _FILE
        if path.exists() and not settings.overwrite:
            try:
                before = msgspec.json.decode(path.read_bytes(), type=Sweep)
            except (OSError, msgspec.DecodeError) as error:
                raise InputError(f"{path} cannot be read: {error}.") from error
            if not before.is_like(wanted):
                raise ConfigError(
                    f"{self.folder} holds a sweep of other models.",
                    hint="Name another --out, or replace it by --overwrite.",
                )
            return before
        if not path.exists() and self.folder.is_dir() and any(self.folder.iterdir()):
            raise ConfigError(f"{self.folder} holds other files.", hint="Name another --out.")
        for name in ("models", "evaluations") if path.exists() else ():
            shutil.rmtree(self.folder / name, ignore_errors=True)
        write_json(path, msgspec.to_builtins(wanted))
        return wanted

    def _asked(self) -> dict[str, Any]:
        """Returns the settings that decide an evaluation, by environment."""
        return {
            member.name: {
                "env": member.settings.env.model_dump(mode="json"),
                "sampling": member.settings.sampling.model_dump(mode="json"),
            }
            for member in self._members()
        }

    def _members(self) -> list[Member[Any]]:
        members = read_members(COMMAND, self._argv, defaults=EVALUATION_DEFAULTS)
        for member in members:
            own: Any = member.settings
            if own.sampling.temperature == 0 and "group_size" not in own.env.model_fields_set:
                own.env.group_size = 1
        return members

    def _model(self, alpha: float) -> Path:
        """Returns the folder of the model of an alpha; merges it if it is not there."""
        if alpha == 0:
            return self._settings.base
        place = self.folder / "models" / _name(alpha)
        if not place.exists():
            from envserver_factory.merging import Recipe, Vector, merge

            self._console.print(f"Merging {_name(alpha)}", highlight=False)
            vector = Vector(self._settings.tuned, self._settings.start)
            merge(Recipe(self._settings.base, (vector,), (alpha,)), [place])
        return place

    def _evaluated(self, model: Path, folder: Path) -> Evaluation:
        members = self._members()
        for member in members:
            member.settings.model = str(model.resolve())
        choice = replace(
            choice_of(self._settings),
            folder=folder,
            resume=read_run_file(folder) is not None,
            overwrite=False,
        )
        view = Progress(self._console)
        stop = SignalStop(self._console.print)
        return run_loop(evaluate_members(members, choice, view=view, stop=stop))

    def _note(self, point: Point, model: Path) -> None:
        others = [one for one in self.sweep.points if one.alpha != point.alpha]
        self.sweep.points = sorted([*others, point], key=lambda one: one.alpha)
        write_json(self.folder / _FILE, msgspec.to_builtins(self.sweep))
        write_text(self.folder / _PICTURE, drawn(self.sweep))
        if point.alpha != 0:
            _write_card(model, _reports(self.folder / "evaluations" / _name(point.alpha)))
        best = self.sweep.best()
        if self._settings.keep == "best" and best is not None:
            for place in (self.folder / "models").glob("alpha-*"):
                if place.name != _name(best.alpha):
                    shutil.rmtree(place)


def _check(settings: SweepSettings) -> None:
    if settings.out is None:
        raise ConfigError("A sweep needs a folder for its models: --out DIR.")
    if settings.model is not None or "base_url" in settings.openai.model_fields_set:
        raise ConfigError(
            "A sweep starts an engine for each of its models: --model and --openai.base_url are "
            "not used.",
            hint="Choose the engine with --engine.backend vllm or local. For an engine that runs "
            "elsewhere, merge first (envserver merge --alpha ...), serve each model there, and "
            "measure it by envserver evaluate --openai.base_url ...",
        )
    if len(set(settings.alpha)) < len(settings.alpha) or not all(
        map(math.isfinite, settings.alpha)
    ):
        raise ConfigError("--alpha needs numbers, each once.")


def _name(alpha: float) -> str:
    return f"alpha-{alpha!r}"


def _reports(folder: Path) -> list[Report]:
    return read_folder(folder, View())


def _described(folder: Path) -> dict[str, Any]:
    """Returns name, and sizes and times of the weights of a model."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder.")
    weights = sorted(folder.glob("*.safetensors"))
    facts = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in weights}
    return {"name": folder.resolve().name, "weights": facts}


def _write_card(model: Path, reports: Sequence[Report]) -> None:
    from envserver_factory.publishing.models import with_results

    card = model / "README.md"
    text = card.read_text(encoding="utf-8") if card.exists() else ""
    write_text(card, with_results(text, model.name, results_of(reports)))
