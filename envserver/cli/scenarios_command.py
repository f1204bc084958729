"""`envserver scenarios`: prints the result of the runs; the work is in `running.scenarios`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from envserver_records.errors import UsageError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..running.scenarios import Embed, Runs, run_scenarios, runners
from ..running.tally import counted
from .command_line import read_run_spec
from .console import Console
from .logs import configure_logs
from .loop import run_loop
from .specs.scenarios_command import COMMAND, ScenarioSettings

ENVIRONMENT = "scenarios"


def run(argv: list[str]) -> int:
    """Runs the command.

    Raises:
        UsageError: the scenario, a model or an existing trace is invalid.
        EngineError: an engine does not answer.
        StoreError: a trace cannot be written.
    """
    line = read_run_spec(COMMAND, argv, environment=ENVIRONMENT)
    settings = line.settings
    configure_logs("warning", settings.log_format)
    models = runners(_words(settings.models, "--models"), settings)
    labels = _words(settings.label, "--label")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        with _bar(console) as bar:
            shown = bar.add_task("", total=None)

            def on_progress(runs: Runs) -> None:
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
                    on_progress=on_progress,
                )
            )
    except KeyboardInterrupt:
        console.print(f"Stopped: run the same command to continue {settings.out}.", markup=False)
        raise
    _show(console, runs, settings.out)
    return 1 if runs.failed else 0


def _words(text: str, flag: str) -> list[str]:
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise UsageError(f"{flag} is empty.")
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
        f"{counted(runs.wanted, 'run')}: {runs.already} existed, {runs.made} new "
        f"({runs.completed} with a final answer), {len(runs.failed)} failed."
    ]
    if runs.rewards:
        mean = sum(runs.rewards) / len(runs.rewards)
        lines.append(f"Mean fraction of checks passed: {mean:.3f} (new runs only).")
    lines += [f"Failed: {words}" for words in runs.failed[:5]]
    lines.append(f"Traces in {out}")
    for text in lines:
        console.print(text, markup=False)
