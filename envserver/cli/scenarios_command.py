"""`envserver scenarios`: prints the result of the runs; the work is in `running.scenarios`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from envserver_records.errors import UsageError
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from ..running.scenarios import Embed, Runs, run_scenarios, runners
from ..running.tally import counted
from .command_line import read_run_spec
from .console import Console
from .logs import configure_logs
from .loop import run_loop
from .specs.scenarios_command import COMMAND, ScenarioSettings

ENVIRONMENT = "scenarios"


def run(argv: list[str]) -> int:
    line = read_run_spec(COMMAND, argv, environment=ENVIRONMENT)
    settings = line.settings
    configure_logs("warning", settings.log_format)
    models = runners(_words(settings.models, "--models"), settings)
    labels = _words(settings.label, "--label")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    failed = False
    for scenario, out in _scenarios(settings):
        try:
            with _bar(console) as bar:
                shown = bar.add_task("", total=None)

                def on_progress(runs: Runs, bar: Progress = bar, shown: TaskID = shown) -> None:
                    bar.update(shown, total=runs.wanted, completed=runs.done)

                runs = run_loop(
                    run_scenarios(
                        models,
                        line.make_environment(),
                        line.reference,
                        scenario,
                        labels,
                        out,
                        n=settings.n,
                        seed=settings.seed,
                        overwrite=settings.overwrite,
                        embed=_embed(settings),
                        on_progress=on_progress,
                    )
                )
        except KeyboardInterrupt:
            console.print(f"Stopped: run the same command to continue {out}.", markup=False)
            raise
        _show(console, runs, out)
        failed = failed or bool(runs.failed)
    return 1 if failed else 0


def _scenarios(settings: ScenarioSettings) -> list[tuple[Path, Path]]:
    """Returns the paths of the scenarios to run, each with the folder of its traces."""
    if not settings.all_scenarios:
        if settings.scenario is None:
            raise UsageError("--scenario is needed, or --all-scenarios.")
        return [(settings.scenario, settings.out)]
    folder = settings.scenario or Path("scenarios")
    found = [path for path in sorted(folder.glob("*")) if _is_scenario(path)]
    if not found:
        raise UsageError(
            f"There is no scenario in the folder {str(folder)!r}.",
            hint="--scenario FOLDER --all-scenarios names another.",
        )
    return [(path, settings.out / path.stem) for path in found]


def _is_scenario(path: Path) -> bool:
    inside = ("scenario.yaml", "real_agent_prompts")
    return path.suffix == ".yaml" or any((path / name).exists() for name in inside)


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
