"""Commands about environments: `init` makes one; `scenarios`, `sft-gen`, `lm-eval` run a model."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from envserver_records.errors import UsageError
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from envserver.cli import lean_imports
from envserver.cli.command_line import (
    ENGINE,
    FREQUENT,
    SAMPLING,
    CommandSpec,
    program,
    read_run_spec,
)
from envserver.settings.config import (
    EngineConfig,
    LogFormat,
    LogLevel,
    OpenAIConfig,
    PricesConfig,
    Settings,
    SimConfig,
)
from envserver.settings.section import Section
from envserver.telemetry.redaction import counted

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from rich.status import Status

    from envserver.cli.console import Console

    from ..lm_eval import CountingEngine
    from ..scenarios import Embed, Runs


class InitSettings(Section):
    name: str
    """Name of the environment: lower-case letters, digits and dashes. Can be given as the first
    argument."""
    kind: Literal["single", "tools", "multi-agent", "sandbox", "judge", "game", "smolagents"] = (
        "single"
    )
    """Kind of environment to begin with: one answer, tools, several agents, programs in a sandbox,
    a judge, a game against the server, an agent of smolagents."""
    out: Path = Path()
    """Folder in which the folder NAME is made."""


INIT = CommandSpec(
    "init",
    """Makes the package of a new environment, which works at once: the environment, a few
rows, a test, a README with its card, and pyproject.toml with the entry point. NAME is the folder
and the name of the environment, such as my-env.""",
    InitSettings,
    usage="NAME",
    arguments=("name",),
)


def run_init(argv: list[str]) -> int:
    from ..scaffold import KINDS, create

    settings = INIT.read(argv)
    written = create(settings.name, settings.kind, settings.out)
    folder = settings.out / settings.name
    lines = [
        f"{folder} is an environment: {KINDS[settings.kind].about}.",
        *(f"  {path}" for path in written),
        "Try next:",
        f"  pip install -e {shlex.quote(f'{folder}[test]')}",
        f"  {program()} check {settings.name}",
        f"  {program()} process --env {settings.name} --model sim",
        f"  pytest {folder}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


class SftSettings(Settings):
    filepath: Path = Path("sft_data.jsonl")
    """JSONL file for the rows. Can be given as the first argument."""
    tokenizer: str | None = None
    """Folder or name of the model's tokenizer; not needed with --save-messages."""
    save_messages: bool = False
    """Save conversations instead of the decoded text of the tokens."""
    save_top_n_per_group: PositiveInt = 3
    """Maximum number of rows from one group."""
    num_seqs_to_save: PositiveInt = 100
    """Number of rows to write before stopping."""
    allow_negative_scores: bool = False
    """Also keep rows with a score of 0 or less."""
    minimum_score_diff_max_min: NonNegativeFloat = 0.0
    """Minimum difference between a row's score and the lowest score of its group."""
    append_to_previous: bool = False
    """Append to an existing file."""


class LmEvalSettings(Section):
    tasks: list[str]
    """Tasks or task groups of the harness (`lm_eval ls tasks`). Can be given as the first
    argument."""
    openai: OpenAIConfig = OpenAIConfig()
    model: str | None = None
    """Model to start an engine for (a name in `engine.models_file`, a folder, a name on the
    hub), or "sim" for the simulated engine; unset: the engine at `openai.base_url`."""
    engine: EngineConfig = EngineConfig()
    sim: SimConfig = SimConfig()
    out: Path | None = None
    """Folder for results and report; may be the folder of an evaluation; unset:
    runs/lm-eval/<time>."""
    resume: bool = False
    """Continue in a folder that has these tasks, without repeating answered requests."""
    overwrite: bool = False
    """Run tasks again that the folder already has."""
    api: Literal["chat", "completions"] = "chat"
    """API used for the engine. Tasks that compare likelihoods of answers need completions, an
    engine that echoes prompt logprobs, and `tokenizer`."""
    num_fewshot: NonNegativeInt | None = None
    """Few-shot examples in each prompt; unset: the task's default."""
    limit: PositiveFloat | None = None
    """Number of documents of each task, or a fraction of them (below 1); unset: all."""
    include_path: Path | None = None
    """Folder with additional tasks in YAML."""
    gen_kwargs: str = ""
    """Sampling arguments that replace the task's: temperature=0.6,max_gen_toks=2048."""
    system_instruction: str = ""
    """System prompt; unset: none."""
    tokenizer: str = ""
    """Folder or hub name of the model's tokenizer, for `completions`."""
    concurrency: PositiveInt = 8
    """Maximum number of concurrent requests."""
    metric: str | None = None
    """Metric used as the reward: exact_match, or exact_match,strict-match with its filter;
    unset: for each task the first metric that is a mean of values from 0 to 1."""
    python: Path | None = None
    """Python interpreter that has lm-evaluation-harness; unset: the one that runs envserver."""
    args: tuple[str, ...] = ()
    """Additional arguments for the harness's command line."""
    pass_at: float = Field(default=1.0, gt=0, le=1)
    """Minimum value of the metric at which a document passes."""
    prices: PricesConfig = PricesConfig()
    log_level: LogLevel = "warning"
    """Minimum log level."""
    log_format: LogFormat = "auto"
    """Format of log lines; auto: console. json is for log collectors."""


SFT_GEN = CommandSpec(
    "sft-gen",
    """Runs rollouts of one environment and writes the best of each group as rows for
supervised training: {"messages", "score"}, or {"prefix", "completion", "score"}.""",
    SftSettings,
    usage="FILE --env NAME",
    arguments=("filepath",),
    aliases={"group_size": "env.group_size", "max_token_len": "env.max_token_length"},
    frequent=(*FREQUENT, "filepath", "tokenizer", "save_messages", "num_seqs_to_save"),
)


def run_sft_gen(argv: list[str]) -> int:
    with lean_imports():
        from envserver.cli.console import Console
        from envserver.cli.loop import SignalStop, run_loop, show_logs
        from envserver.cli.progress import ProgressView

        from ..sft_gen import generate

    line = read_run_spec(SFT_GEN, argv)
    show_logs(line.settings)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    stop = SignalStop(console.say)
    show = partial(ProgressView, console)
    made = run_loop(generate(line, line.make_environment(), show, stop))
    rows = f"{counted(made.rows, 'row')} of {counted(made.groups, 'group')}"
    console.say(f"{rows} in {line.settings.filepath}")
    return 0 if made.ending == "done" else 130


LM_EVAL = CommandSpec(
    "lm-eval",
    """Runs tasks of lm-evaluation-harness (gsm8k, aime24, ifeval ...) against an engine
and writes the results in the format of `evaluate`: a report with intervals that `evaluate
compare` can read. In the folder of an evaluation (--out) they become part of its report. The
harness downloads the data of its tasks itself; it is the extra `lm-eval`.""",
    LmEvalSettings,
    usage="TASKS",
    arguments=("tasks",),
    frequent=(
        *("tasks", *ENGINE, "out", "resume", "overwrite", "api", "tokenizer", "num_fewshot"),
        *("limit", "concurrency", "metric", "pass_at"),
    ),
    openai_variables="openai",
)


def run_lm_eval(argv: list[str]) -> int:
    with lean_imports():
        from envserver.cli.console import Console
        from envserver.cli.evaluating import show_report
        from envserver.cli.loop import run_loop, show_logs

        from ..lm_eval import lm_eval

    settings = LM_EVAL.read(argv)
    show_logs(settings)
    console = Console(stderr=True)
    folder, report = run_loop(lm_eval(settings, tell=console.say, watch=partial(_watched, console)))
    show_report(console, report, folder)
    return 0


@contextlib.asynccontextmanager
async def _watched(console: Console, engine: CountingEngine) -> AsyncIterator[None]:
    import asyncio

    async def update(status: Status) -> None:
        while True:
            await asyncio.sleep(0.5)
            spent = engine.spent
            tokens = spent.prompt_tokens + spent.completion_tokens
            status.update(f"{spent.requests:,} answers, {tokens:,} tokens")

    if not console.is_terminal:
        yield
        return
    with console.status("Starting the harness") as status:
        updating = asyncio.create_task(update(status))
        try:
            yield
        finally:
            updating.cancel()


class ScenarioSettings(Settings):
    scenario: Path | None = None
    """Scenario: a folder, a YAML file, or the name of one in `scenarios/` or of the sample."""
    all_scenarios: bool = False
    """Run every scenario in the folder `--scenario` (unset: `scenarios`); the traces of each go
    into a folder of its name."""
    models: str
    """Models, separated by commas: names in `engine.models_file`, folders,
    NAME=http://host:port/v1 or only such an address, or sim."""
    n: PositiveInt = 20
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
    """Runs models in a scenario (a folder or YAML file with a prompt, a workspace and
checks) and writes each run as a trace OUT/MODEL/LABEL/run_NNN.json: thoughts, tool calls,
results and the final answer of the protocol THOUGHT / TOOL_CALL / FINAL. Existing runs are not
repeated. Exit status 1: a run failed through no fault of the model.""",
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
        from envserver.cli.console import Console
        from envserver.cli.loop import configure_logs, run_loop

        from .. import scenarios

    line = read_run_spec(SCENARIOS, argv, environment="scenarios")
    settings = line.settings
    configure_logs("warning", settings.log_format)
    models = scenarios.runners(_words(settings.models, "--models"), settings)
    labels = _words(settings.label, "--label")
    console = Console(stderr=True)
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
                        scenarios.Work(
                            line.make_environment(),
                            line.reference,
                            out,
                            _embed(settings),
                            on_progress,
                        ),
                        scenario,
                        labels,
                        n=settings.n,
                        seed=settings.seed,
                        overwrite=settings.overwrite,
                    )
                )
        except KeyboardInterrupt:
            console.say(f"Stopped: run the same command to continue {out}.")
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
    from ..exporting.formats import Embedder, embed_steps

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
        console.say(text)
