"""Commands on a model's weights: `merge`, `sweep` and `publish`.

A sweep merges, evaluates and draws, one alpha after the other:

    OUT/models/alpha-A        the merged models (alpha 0 is the base itself)
    OUT/evaluations/alpha-A   folders of `evaluate`
    OUT/sweep.json, sweep.svg the results so far; written again after each alpha

An alpha whose evaluation is complete is neither merged nor evaluated again; a folder belongs to one
sweep.
"""

from __future__ import annotations

import math
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from envserver_records.errors import ConfigError, InputError, UsageError
from envserver_records.tasks import Json
from pydantic import Field

from envserver.cli import lean_imports
from envserver.cli.command_line import FREQUENT, CommandSpec
from envserver.running.run_settings import EvaluateSettings
from envserver.settings.section import Section

if TYPE_CHECKING:
    from rich.progress import Progress

    from envserver.cli.console import Console
    from envserver.evaluation.report import Report
    from envserver.running.evaluating import Evaluation

    from ..publishing.models import Plan, Result
    from ..sweep import Point, Sweep


SUMMARY = """Merges the weights of models: base + alpha * (rl - sft), or base + alpha * the sum
of weight * (model - base), for several alphas in one pass, with a few megabytes of memory. Other
methods (ties, dare_ties, slerp, ...) use mergekit if it is installed."""

ARITHMETIC = "arithmetic"


class MergeSettings(Section):
    base: Path
    """Folder of the base model; its config, tokenizer and dtypes are kept."""
    rl: Path | None = None
    """Folder of the model after reinforcement learning: a model or a LoRA adapter."""
    sft: Path | None = None
    """Folder of the model before reinforcement learning: a model or a LoRA adapter."""
    add: list[str] = Field(default=[])
    """DIR=WEIGHT: add WEIGHT * (DIR - base); FILE=WEIGHT: add WEIGHT * a vector of --save_vector.
    May be repeated; WEIGHT may be negative."""
    alpha: list[float] = Field(default=[])
    """Factors of the added difference: one model in OUT/alpha-A for each; unset: factor 1, in
    OUT itself."""
    out: Path | None = None
    """Output folder, written atomically."""
    save_vector: Path | None = None
    """File for what is added to the base, before alpha: a safetensors file that --add takes. With
    this, --out may be missing."""
    method: str = ARITHMETIC
    """arithmetic, or a mergekit method: ties, dare_ties, dare_linear, della, slerp, linear, ..."""
    density: float | None = Field(default=None, gt=0, le=1)
    """With a mergekit method: fraction of each difference that is kept."""
    parameters: dict[str, Any] = Field(default={})
    """With a mergekit method: additional parameters, such as {"normalize": true}."""
    allow_config_differences: bool = False
    """Merge models with different configs; the base's config is kept."""
    allow_tokenizer_differences: bool = False
    """Merge models with different tokenizers; the base's tokenizer is kept."""
    allow_missing_tensors: bool = False
    """Keep the base's tensors that a model lacks, and ignore tensors that the base lacks."""
    allow_not_finite: bool = False
    """Allow infinities and NaNs in the output."""
    overwrite: bool = False
    """Replace existing merged models."""


MERGE = CommandSpec(
    "merge", SUMMARY, MergeSettings, usage="--base DIR --sft DIR --rl DIR --alpha 0.5,1.0 --out DIR"
)


def run_merge(argv: list[str]) -> int:
    with lean_imports():
        from envserver.cli.console import Console

    settings = MERGE.read(argv)
    console = Console(stderr=True)
    with _ended_by_sigterm():
        try:
            places, notes = _merged(settings, console)
        except KeyboardInterrupt:
            console.print("Stopped: nothing was written.", highlight=False)
            raise
    for note in notes:
        console.say(f"Note: {note}.")
    for place in places:
        print(place)
    return 0


def _merged(settings: MergeSettings, console: Console) -> tuple[list[Path], list[str]]:
    from ..merging.checks import Allowed, Method, merge_with
    from ..merging.writing import Recipe, Vector, parse_parts

    vectors = parse_parts(settings.add)
    if (settings.rl is None) != (settings.sft is None):
        raise UsageError("--rl and --sft must be given together: rl - sft is added.")
    if settings.rl is not None:
        vectors = (Vector(settings.rl, settings.sft), *vectors)
    recipe = Recipe(settings.base, vectors, tuple(settings.alpha) or (1.0,))
    allowed = Allowed(
        config=settings.allow_config_differences,
        tokenizer=settings.allow_tokenizer_differences,
        missing=settings.allow_missing_tensors,
    )
    if settings.method != ARITHMETIC:
        if settings.out is None or settings.save_vector is not None:
            raise UsageError("A mergekit method needs --out, and makes no --save_vector.")
        method = Method(settings.method, settings.density, settings.parameters)
        notes = merge_with(
            method, recipe, settings.out, allowed=allowed, overwrite=settings.overwrite
        )
        return [settings.out], notes
    if settings.density is not None or settings.parameters:
        raise ConfigError("--density and --parameters need a mergekit method: set --method.")
    return _with_arithmetic(settings, recipe, allowed, console)


def _with_arithmetic(
    settings: MergeSettings, recipe: Any, allowed: Any, console: Console
) -> tuple[list[Path], list[str]]:
    from ..merging import merge

    with _bar(console) as bar:
        task = bar.add_task("merging", total=None)
        merged = merge(
            recipe,
            _places(settings),
            vector=settings.save_vector,
            allowed=allowed,
            allow_not_finite=settings.allow_not_finite,
            overwrite=settings.overwrite,
            begin=lambda total: bar.update(task, total=total),
            report=lambda done: bar.advance(task, done),
        )
    return [
        *merged.folders,
        *([settings.save_vector] if settings.save_vector else []),
    ], merged.notes


def _places(settings: MergeSettings) -> list[Path]:
    """Returns the folders to make: none where only the vector is wanted."""
    if settings.out is None:
        if settings.save_vector is None or settings.alpha:
            raise UsageError("--out DIR is needed.")
        return []
    out = settings.out
    return [out / f"alpha-{alpha!r}" for alpha in settings.alpha] or [out]


def _bar(console: Console) -> Progress:
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    hidden = not console.is_terminal
    return progress.Progress(*columns, console=console, transient=True, disable=hidden)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM act like Ctrl-C, so that partial output is removed."""
    from envserver.cli.loop import Terminated

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_SWEEP = """Merges base + alpha * (tuned - start) for each alpha, evaluates each model, and draws
its reward over alpha. Each model is served by an engine that this command starts
(--engine.backend vllm, local or auto), and evaluated as by `envserver evaluate`, with the same
settings. Into --out go the models, the evaluations, sweep.json and sweep.svg; results are written
into each model's card. The same command continues after an interruption."""


class SweepSettings(EvaluateSettings):
    base: Path
    """Folder of the base model: the one with alpha 0."""
    tuned: Path
    """Folder of the fine-tuned model or LoRA adapter."""
    start: Path | None = None
    """Folder of the model or adapter that `tuned` was trained from; unset: the base."""
    alpha: list[float] = Field(default=[0.0, 0.25, 0.5, 0.75, 1.0], min_length=1)
    """Factors of the difference, such as 0,0.25,0.5."""
    keep: Literal["all", "best"] = "all"
    """Which merged models stay on disk: all, or the one with the highest reward so far."""


SWEEP = CommandSpec(
    "sweep",
    _SWEEP,
    SweepSettings,
    usage="--base DIR --tuned DIR --alpha 0,0.5,1 --env NAME --out DIR",
    frequent=(
        *("base", "tuned", "start", "alpha", "keep"),
        *(name for name in FREQUENT if name != "model" and not name.startswith("openai.")),
        *("out", "overwrite", "pass_at", "engine.backend"),
    ),
    aliases={"ray": "ray.address"},
)

_FILE = "sweep.json"
_PICTURE = "sweep.svg"


def run_sweep(argv: list[str]) -> int:
    """Returns 0 if all alphas were evaluated, 130 if it was stopped early."""
    with lean_imports():
        from envserver.cli.console import Console
        from envserver.cli.evaluating import read_members, show_tables
        from envserver.cli.loop import show_logs

        from ..sweep import table_of

    settings = read_members(SWEEP, argv)[0].settings
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
    def __init__(self, settings: SweepSettings, argv: list[str], console: Console) -> None:
        _check_sweep(settings)
        assert settings.out is not None
        self.folder = settings.out
        self.sweep = self._opened(settings)
        self._settings = settings
        self._argv = argv
        self._console = console

    def evaluate(self, alpha: float) -> bool:
        """Returns False if it was stopped."""
        from ..sweep import Point

        folder = self.folder / "evaluations" / _folder_name(alpha)
        request = self._asked()
        known = next((point for point in self.sweep.points if point.alpha == alpha), None)
        if known is None or known.asked != request:
            model = self._model(alpha)
            self._console.print(f"alpha {alpha:g}", style="bold", highlight=False)
            done = self._evaluated(model, folder)
            if done.stopped:
                return False
            self._note(Point.of(alpha, str(model), request, _reports(folder)), model)
        return True

    def notes(self) -> list[str]:
        best = self.sweep.best()
        notes = [f"Best: alpha {best.alpha:g}, {best.model}"] if best else []
        return [*notes, "The best alpha was chosen on these tasks: measure its model on others."]

    def _opened(self, settings: SweepSettings) -> Sweep:
        """Returns the sweep in the folder, new or begun earlier; claims the folder."""
        from envserver.export.unified import write_json

        from ..sweep import Sweep

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
                    hint="Name another --out, or replace it with --overwrite.",
                )
            return before
        if not path.exists() and self.folder.is_dir() and any(self.folder.iterdir()):
            raise ConfigError(f"{self.folder} holds other files.", hint="Name another --out.")
        for name in ("models", "evaluations") if path.exists() else ():
            shutil.rmtree(self.folder / name, ignore_errors=True)
        write_json(path, msgspec.to_builtins(wanted))
        return wanted

    def _asked(self) -> Json:
        from envserver.cli.evaluating import read_members

        return {
            member.name: {
                "env": member.settings.env.model_dump(mode="json"),
                "sampling": member.settings.sampling.model_dump(mode="json"),
            }
            for member in read_members(SWEEP, self._argv)
        }

    def _model(self, alpha: float) -> Path:
        if alpha == 0:
            return self._settings.base
        place = self.folder / "models" / _folder_name(alpha)
        if not place.exists():
            from ..merging import Recipe, Vector, merge

            self._console.print(f"Merging {_folder_name(alpha)}", highlight=False)
            vector = Vector(self._settings.tuned, self._settings.start)
            merge(Recipe(self._settings.base, (vector,), (alpha,)), [place])
        return place

    def _evaluated(self, model: Path, folder: Path) -> Evaluation:
        from envserver.cli.evaluating import Progress, read_members
        from envserver.cli.loop import SignalStop, run_loop
        from envserver.evaluation.folders import read_run_file
        from envserver.running.evaluating import evaluate_members
        from envserver.running.python_api import choice_of

        members = read_members(SWEEP, self._argv)
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
        from envserver.export.unified import write_json
        from envserver.running.evaluation_folder import write_text

        from ..sweep import drawn

        others = [known for known in self.sweep.points if known.alpha != point.alpha]
        self.sweep.points = sorted([*others, point], key=lambda placed: placed.alpha)
        write_json(self.folder / _FILE, msgspec.to_builtins(self.sweep))
        write_text(self.folder / _PICTURE, drawn(self.sweep))
        if point.alpha != 0:
            _write_card(model, self.folder / "evaluations" / _folder_name(point.alpha))
        best = self.sweep.best()
        if self._settings.keep == "best" and best is not None:
            for place in (self.folder / "models").glob("alpha-*"):
                if place.name != _folder_name(best.alpha):
                    shutil.rmtree(place)


def _check_sweep(settings: SweepSettings) -> None:
    if settings.out is None:
        raise ConfigError("A sweep needs a folder for its models: --out DIR.")
    if settings.model is not None or "base_url" in settings.openai.model_fields_set:
        raise ConfigError(
            "A sweep starts an engine for each of its models: --model and --openai.base_url are "
            "not used.",
            hint="Choose the engine with --engine.backend vllm or local. For a remote "
            "engine, merge first (envserver merge --alpha ...), serve each model there, and "
            "measure it by envserver evaluate --openai.base_url ...",
        )
    if len(set(settings.alpha)) < len(settings.alpha) or not all(
        map(math.isfinite, settings.alpha)
    ):
        raise ConfigError("--alpha needs numbers, each once.")


def _folder_name(alpha: float) -> str:
    return f"alpha-{alpha!r}"


def _reports(folder: Path) -> list[Report]:
    from envserver.evaluation.folders import View, read_folder

    return read_folder(folder, View())


def _described(folder: Path) -> Json:
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder.")
    weights = sorted(folder.glob("*.safetensors"))
    facts = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in weights}
    return {"name": folder.resolve().name, "weights": facts}


def _write_card(model: Path, evaluation: Path) -> None:
    from envserver.running.evaluation_folder import write_text

    from ..publishing.models import with_results

    card = model / "README.md"
    text = card.read_text(encoding="utf-8") if card.exists() else ""
    write_text(card, with_results(text, model.name, results_in(evaluation)))


_PUBLISH = """Publishes a model or a LoRA adapter to the Hugging Face hub in one commit, with its
card: weights as safetensors, config, tokenizer, chat template, card, recipe, metrics. Never
optimizer states, checkpoints, subfolders or other files; a file that seems to contain a secret ends
the command. A missing repository is created as private. The token is the one of `hf auth login`,
or HF_TOKEN."""


class PublishSettings(Section):
    folder: Path
    """Folder of the model or adapter. Can be given as the first argument."""
    repository: str
    """Name on the hub, OWNER/NAME. Can be given as the second argument."""
    evaluation: list[Path] = Field(default=[])
    """Folders of `evaluate` whose results are written into the card (model-index and a table)."""
    public: bool = False
    """Create a public repository, or publish to one."""
    dry_run: bool = False
    """Show the files and the card exactly as they would be uploaded; the hub is not contacted."""
    base_model: str | None = None
    """Hub id of the base model, for the card and the adapter's config."""
    license: str | None = None
    """License, for the card."""


PUBLISH = CommandSpec(
    "publish",
    _PUBLISH,
    PublishSettings,
    usage="FOLDER OWNER/NAME",
    arguments=("folder", "repository"),
)


def run_publish(argv: list[str]) -> int:
    with lean_imports():
        from envserver.cli.console import Console

        from ..publishing.models import plan, publish

    settings = PUBLISH.read(argv)
    planned = plan(
        settings.folder,
        settings.repository,
        results=[results for folder in settings.evaluation for results in results_in(folder)],
        base_model=settings.base_model,
        license=settings.license,
        private=not settings.public,
    )
    _show_plan(Console(stderr=True), planned)
    if settings.dry_run:
        print(planned.card, end="")
    else:
        print(publish(planned))
    return 0


def results_in(folder: Path) -> list[Result]:
    """Returns the results of an evaluation for a card; parts without a score are left out."""
    from ..publishing.models import Result

    return [
        Result(
            environment=report.name or report.env,
            split=str(report.split),
            tasks=measured.tasks,
            attempts=measured.rollouts,
            mean_reward=measured.mean_reward.value,
            low=measured.mean_reward.low,
            high=measured.mean_reward.high,
            pass_at={k: share.value for k, share in measured.pass_at.items()},
        )
        for report in _reports(folder)
        if (measured := report.run.overall) is not None
    ]


def _show_plan(console: Console, planned: Plan) -> None:
    from envserver.cli.evaluating import show_tables
    from envserver.evaluation.tables import TextTable

    kind = "a private" if planned.private else "a public"
    files = [[file.name, f"{file.size:,}", file.sha256[:12]] for file in planned.files]
    tables = [
        TextTable(f"To {planned.repository}, {kind} model", ["file", "bytes", "sha256"], files)
    ]
    if planned.left_out:
        rows = [[name, reason] for name, reason in planned.left_out.items()]
        tables.append(TextTable("Not uploaded", ["file", "reason"], rows))
    show_tables(console, tables, [])
