"""`envserver scenarios`: runs models in scenarios and keeps their traces."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from envserver_records.errors import UsageError
from pydantic import Field

from envserver.cli import lean_imports
from envserver.cli.command_line import SAMPLING, CommandSpec, read_run_spec
from envserver.settings.config import Settings
from envserver.telemetry.redaction import counted

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from envserver.cli.console import Console

    from ..scenarios import Embed, Runs

_SUMMARY = """Runs models in a scenario (a folder or YAML file with a prompt, a workspace and
checks) and writes each run as a trace OUT/MODEL/LABEL/run_NNN.json: thoughts, tool calls,
results and the final answer of the protocol THOUGHT / TOOL_CALL / FINAL. Existing runs are not
repeated. Exit status 1: a run failed through no fault of the model."""


class ScenarioSettings(Settings):
    scenario: Path | None = None
    """Scenario: a folder, a YAML file, or the name of one in `scenarios/` or of the sample."""
    all_scenarios: bool = False
    """Run every scenario in the folder `--scenario` (unset: `scenarios`); the traces of each go
    into a folder of its name."""
    models: str
    """Models, separated by commas: names in `engine.models_file`, folders,
    NAME=http://host:port/v1 or only such an address, or sim."""
    n: int = Field(default=20, ge=1)
    """Runs of each model and label."""
    label: str = "gold"
    """Which prompts of the scenario to use, separated by commas."""
    out: Path = Path("traces")
    """Folder for the traces."""
    seed: int = 0
    """Base seed; run N (from 1) uses seed + N."""
    overwrite: bool = False
    """Repeat runs that already have traces."""
    embed: str | None = None
    """Sentence-transformers model that adds an embedding of its text to each step (needs the
    extra `embeddings`); unset: no embeddings."""
    embed_cache: Path = Path("data/embeddings")
    """Cache folder for embeddings, keyed by text and model."""


COMMAND = CommandSpec(
    "scenarios",
    _SUMMARY,
    ScenarioSettings,
    usage="--models NAME,NAME (--scenario PATH | --all-scenarios)",
    aliases={"max_steps": "env.max_turns"},
    frequent=(
        *("scenario", "all_scenarios", "models", "n", "label", "out", "seed", "overwrite"),
        *("openai.api_key", *SAMPLING, "rollouts.max_concurrent"),
    ),
)


def run(argv: list[str]) -> int:
    with lean_imports():
        from envserver.cli.console import Console
        from envserver.cli.loop import configure_logs, run_loop

        from .. import scenarios

    line = read_run_spec(COMMAND, argv, environment="scenarios")
    settings = line.settings
    configure_logs("warning", settings.log_format)
    models = scenarios.runners(_words(settings.models, "--models"), settings)
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
                    scenarios.run_scenarios(
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
        _show_runs(console, runs, out)
        failed = failed or bool(runs.failed)
    return 1 if failed else 0


def _scenarios(settings: ScenarioSettings) -> list[tuple[Path, Path]]:
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
    from ..exporting.readable import Embedder, embed_steps

    embedder = Embedder(settings.embed, cache=settings.embed_cache)
    return partial(embed_steps, embedder=embedder)


def _bar(console: Console) -> Progress:
    from rich import progress

    columns = (
        progress.TextColumn("runs"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    return progress.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    )


def _show_runs(console: Console, runs: Runs, out: Path) -> None:
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
