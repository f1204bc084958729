"""`envserver scenarios`: its settings and what it shows; the work: `running.scenarios`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from envserver_records.errors import UsageError
from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..config import Settings
from ..running.scenarios import Embed, Runs, run_scenarios, runners
from ..running.tally import counted
from .command_line import CommandSpec, read_run_spec
from .logs import configure_logs
from .loop import run_loop

SUMMARY = """Runs models in a scenario (a folder or YAML file with a prompt, a workspace and checks)
and writes each run as a trace OUT/MODEL/LABEL/run_NNN.json: thoughts, tool calls, results and the
final answer of the protocol THOUGHT / TOOL_CALL / FINAL. Runs that are there are not made again.
Exit status 1 where a run failed by no fault of the model."""

ENVIRONMENT = "scenarios"


class ScenarioSettings(Settings):
    """Settings with the flags that only `scenarios` has."""

    scenario: Path
    """Folder or YAML file."""
    models: str
    """Names of models, with commas: of `engine.models_file`, folders, NAME=http://host:port/v1 or
    such an address alone, or sim."""
    n: int = Field(default=20, ge=1)
    """Runs of each model and label."""
    label: str = "gold"
    """Which of the scenario's prompts; several with commas."""
    out: Path = Path("traces")
    """Folder for the traces."""
    seed: int = 0
    """Of run N it is this + N, from 1 on."""
    overwrite: bool = False
    """Make runs again whose traces are there."""
    embed: str | None = None
    """Add an embedding of its text to each step: a model of sentence-transformers (extra
    `embeddings`); unset: none."""
    embed_cache: Path = Path("data/embeddings")
    """Folder where embeddings are kept by their text and model."""


COMMAND = CommandSpec("scenarios", SUMMARY, ScenarioSettings, usage="--models NAME,NAME")


def run(argv: list[str]) -> int:
    """The command.

    Raises:
        UsageError: the scenario, a model or a trace that is there is not as it must be.
        EngineError: an engine does not answer.
        StoreError: a trace cannot be written.
    """
    line = read_run_spec(COMMAND, argv, environment=ENVIRONMENT)
    if line is None:
        return 0
    settings = line.settings
    configure_logs("warning", settings.log_format)
    models = runners(_words(settings.models, "--models"), settings)
    labels = _words(settings.label, "--label")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        with _bar(console) as bar:
            shown = bar.add_task("", total=None)

            def told(runs: Runs) -> None:
                bar.update(shown, total=runs.wanted, completed=runs.done)

            runs = run_loop(
                run_scenarios(
                    models,
                    line.make_environment(),
                    line.reference,
                    settings.scenario,
                    labels,
                    settings.out,
                    n=settings.n,
                    seed=settings.seed,
                    overwrite=settings.overwrite,
                    embed=_embed(settings),
                    told=told,
                )
            )
    except KeyboardInterrupt:
        console.print(f"Stopped: the same command goes on with {settings.out}.", markup=False)
        raise
    _show(console, runs, settings.out)
    return 1 if runs.failed else 0


def _words(text: str, flag: str) -> list[str]:
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise UsageError(f"{flag} names nothing.")
    return words


def _embed(settings: ScenarioSettings) -> Embed | None:
    if settings.embed is None:
        return None
    from ..export.embeddings import Embedder, embed_steps

    embedder = Embedder(settings.embed, cache=settings.embed_cache)
    return partial(embed_steps, embedder=embedder)


def _bar(console: Console) -> Progress:
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _show(console: Console, runs: Runs, out: Path) -> None:
    lines = [
        f"{counted(runs.wanted, 'run')}: {runs.already} there already, {runs.made} made "
        f"({runs.completed} with a final answer), {len(runs.failed)} failed."
    ]
    if runs.rewards:
        mean = sum(runs.rewards) / len(runs.rewards)
        lines.append(f"Mean share of checks that hold: {mean:.3f} (of the runs made now).")
    lines += [f"Failed: {words}" for words in runs.failed[:5]]
    lines.append(f"Traces in {out}")
    for text in lines:
        console.print(text, markup=False)
