"""Commands that make rollouts and keep them in files: `process`, `sft-gen` and `scenarios`.

`sft-gen` has the flags of Atropos' `atropos-sft-gen`, which fetches rollouts from a server; this
command makes them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from envserver_records.errors import UsageError
from pydantic import Field, SecretStr
from pydantic_core import to_jsonable_python

from ..running.run_settings import ProcessSettings, SftSettings
from ..settings.config import OpenAIConfig, Settings
from ..settings.environment import EnvironmentConfig
from ..telemetry.redaction import counted
from . import lean_imports
from .command_line import FREQUENT, SAMPLING, CommandSpec, program, read_run_spec

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ..running.scenarios import Embed, Runs
    from .console import Console


SUMMARY = """Runs rollouts of one or more environments and writes each finished group as a line
of JSON. Ctrl-C once finishes the open groups and stops; twice stops at once,
a third time kills. Written groups are
never lost."""

COMMAND = CommandSpec(
    "process",
    SUMMARY,
    ProcessSettings,
    usage="--env NAME[=WEIGHT,NAME=WEIGHT]",
    frequent=(
        *FREQUENT,
        "env.data_path_to_save_groups",
        "resume",
        "overwrite",
        "verbose",
        "ray.address",
        "ray.runners",
    ),
    aliases={
        "ray": "ray.address",
        "limit": "total_groups",
        "out": "env.data_path_to_save_groups",
        "o": "env.data_path_to_save_groups",
    },
    openai_variables="openai",
)

_SECRET = re.compile("token|key|secret|password")


def run(argv: list[str]) -> int:
    with lean_imports():
        from ..running.group_run import process_run
        from ..running.mix import alone
        from .console import Console
        from .conversation import Samples
        from .logs import show_logs
        from .loop import SignalStop, run_loop
        from .mixing import read_mix
        from .progress import ProgressView, show_result

    members = read_mix(COMMAND, argv) or [alone(read_run_spec(COMMAND, argv))]
    spec = members[0].spec
    show_logs(spec.settings)
    console = Console(stderr=True)
    run = process_run(
        members,
        give=Samples(console) if spec.settings.verbose else None,
        show=partial(ProgressView, console),
        stop=SignalStop(console.print),
    )
    try:
        run_loop(run.run())
    finally:
        show_result(console, run, spec.settings)
    if run.stopped:
        console.print("Stopped early; run the same command with --resume to continue.")
        return 130
    if len(members) == 1 and run.tally.groups:
        console.print("Try next:")
        exact = "missing_token_ids" not in run.tally.flags
        path = next(iter(run.files))
        for command in _suggestions(spec.reference, spec.settings, path, exact=exact):
            console.say(f"  {command}")
    return 0


def _suggestions(reference: str, settings: Settings, path: Path, *, exact: bool) -> Iterator[str]:
    """Yields commands to try next, as they can be typed.

    Args:
        exact: the engine returned token ids.
    """
    from ..running.engines import SIMULATED

    envserver = program()
    yield f"{envserver} view {quote(os.fspath(path))}   # in a browser"
    environment = " ".join([f"--env {quote(reference)}", *_as_set(settings)])
    if settings.model != SIMULATED:
        if exact:
            urls = quote(",".join(settings.openai.base_urls))
            engine = f"--model {quote(settings.model)}" if settings.model else ""
            engine = engine or f"--openai.base_url {urls}"
            yield f"{envserver} verify {quote(os.fspath(path))} {engine}"
            yield f"{envserver} serve {environment} {engine}   # for a trainer"
        return
    replaced = "" if settings.env.data_path_to_save_groups else " --overwrite"
    url = OpenAIConfig().base_urls[0]
    yield f"{envserver} process {environment} --openai.base_url {url}{replaced}   # a real engine"
    yield f"{envserver} serve {environment} --model sim   # for a trainer"


def _as_set(settings: Settings) -> Iterator[str]:
    """Yields flags for the given settings of the environment and of the agent, without secrets."""
    for section, model in (("env", settings.env), ("agent", settings.agent)):
        own = model.model_fields_set - EnvironmentConfig.model_fields.keys()
        for name in type(model).model_fields:
            value = getattr(model, name)
            # An environment in another interpreter has its secrets as text.
            if name not in own or isinstance(value, SecretStr) or _SECRET.search(name):
                continue
            plain = to_jsonable_python(value)
            text = plain if isinstance(plain, str) else json.dumps(plain)
            yield f"--{section}.{name} {quote(text)}"


_SFT_GEN = """Runs rollouts of one environment and writes the best of each group as rows for
supervised training: {"messages", "score"}, or {"prefix", "completion", "score"}."""

SFT_GEN = CommandSpec(
    "sft-gen",
    _SFT_GEN,
    SftSettings,
    usage="FILE --env NAME",
    arguments=("filepath",),
    aliases={"group_size": "env.group_size", "max_token_len": "env.max_token_length"},
    frequent=(*FREQUENT, "filepath", "tokenizer", "save_messages", "num_seqs_to_save"),
)


def run_sft_gen(argv: list[str]) -> int:
    """Returns 130 if it was stopped early, else 0."""
    with lean_imports():
        from ..running.sft_generating import generate
        from .console import Console
        from .logs import show_logs
        from .loop import SignalStop, run_loop
        from .progress import ProgressView

    line = read_run_spec(SFT_GEN, argv)
    show_logs(line.settings)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    stop = SignalStop(partial(console.print, markup=False))
    show = partial(ProgressView, console)
    made = run_loop(generate(line, line.make_environment(), show, stop))
    rows = f"{counted(made.rows, 'row')} of {counted(made.groups, 'group')}"
    console.print(f"{rows} in {line.settings.filepath}", markup=False)
    return 0 if made.ending == "done" else 130


_SCENARIOS = """Runs models in a scenario (a folder or YAML file with a prompt, a workspace and
checks) and writes each run as a trace OUT/MODEL/LABEL/run_NNN.json: thoughts, tool calls,
results and the final answer of the protocol THOUGHT / TOOL_CALL / FINAL. Existing runs are not
repeated. Exit status 1: a run failed through no fault of the model."""


class ScenarioSettings(Settings):
    """Settings of `scenarios`."""

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


SCENARIOS = CommandSpec(
    "scenarios",
    _SCENARIOS,
    ScenarioSettings,
    usage="--models NAME,NAME (--scenario PATH | --all-scenarios)",
    aliases={"max_steps": "env.max_turns"},
    frequent=(
        *("scenario", "all_scenarios", "models", "n", "label", "out", "seed", "overwrite"),
        *("openai.api_key", *SAMPLING, "rollouts.max_concurrent"),
    ),
)


def run_scenarios(argv: list[str]) -> int:
    with lean_imports():
        from ..running import scenarios
        from .console import Console
        from .logs import configure_logs
        from .loop import run_loop

    line = read_run_spec(SCENARIOS, argv, environment="scenarios")
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
