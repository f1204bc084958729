"""`envserver sft`: rows for fine-tuning, from data, or from the answers of a teacher.

A run of the environment of that name, as `process` makes it, is all of `router|math|code generate`;
then its groups become rows: plans by `sft_building`, solutions by `envserver export`.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from envserver_records.errors import ConfigError, UsageError
from envserver_records.tasks import Json
from pydantic import Field, PositiveInt

from envserver.cli import lean_imports
from envserver.cli.command_line import ENGINE, SAMPLING, CommandSpec
from envserver.settings.config import SandboxConfig, Settings
from envserver.settings.section import AgentConfig, Section

if TYPE_CHECKING:
    from rich.table import Table

    from envserver.cli.console import Console
    from envserver.running.group_run import GroupRun

    from ..sft_building.per_tool import Choice


_BUILD = """Builds rows for supervised fine-tuning from unified trajectories, one folder for
each tool that has a template: OUT/TOOL/train.jsonl, OUT/TOOL/val.jsonl and OUT/SUMMARY.json. A
row is {"tool", "instruction", "output", "meta"}. The same files, templates and seed give the
same rows."""


class RowSettings(Section):
    sources: list[str]
    """Files, folders and globs of unified trajectories. Can be given as the first arguments."""
    templates: Path = Path("configs/sft_templates.yaml")
    """YAML file with a template for each tool that gets rows."""
    min_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Minimum reward of a trajectory; if set, trajectories without a reward are left out."""
    context: bool = False
    """Fill {context} with the outputs of the earlier actions; otherwise it is empty, as in the
    original script."""
    notes: bool = False
    """Fill {notes} with the outputs of earlier hops; otherwise it is empty."""
    characters: PositiveInt = 4000
    """Maximum length of {context} and of {notes} in characters; the end is kept."""
    form: Literal["rows", "messages"] = "rows"
    """rows: instruction and output; messages: the same as a conversation."""


class BuildSettings(RowSettings):
    out: Path = Path("data/sft")
    """Output folder: new, empty, or written by an earlier build, which is replaced."""
    seed: int = 123
    """Shuffle seed."""
    val_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Fraction of each tool's rows held out for validation, rounded down, but at least one row."""
    strict_split: bool = False
    """Put a tool's only row into train.jsonl alone; otherwise into both files, as in the
    original script."""
    group_by: Literal["task_id"] | None = None
    """task_id: keep all rows of a task in the same split, across all tools."""
    upload: str | None = None
    """Also upload the folder: to a folder, a bucket (gs://bucket/prefix, any fsspec URL), or the
    hub (hf://datasets/OWNER/NAME)."""


BUILD = CommandSpec(
    "sft build",
    _BUILD,
    BuildSettings,
    usage="SOURCE...",
    arguments=("sources",),
    aliases={"unified_glob": "sources"},
)


def run_build(argv: list[str]) -> int:
    with lean_imports():
        from envserver.cli.console import Console, reading_bar

        from ..sft_building.per_tool import build, read_templates
        from ..trajectories import files_of

    settings = BUILD.read(argv)
    _check_upload(settings.upload)
    templates = read_templates(settings.templates)
    choice = _choice(settings, "seed", "val_ratio", "strict_split", "group_by", "min_reward")
    size = sum(path.stat().st_size for path in files_of(settings.sources))
    with reading_bar("trajectories", size) as on_progress:
        report = build(settings.sources, templates, settings.out, choice, on_progress=on_progress)
    console = Console()
    console.print(_table(report.summary))
    left_out = [
        f"{report.read} trajectories read",
        f"{report.below} below the minimum reward",
        f"{report.without_template} actions without a template in {settings.templates}",
        f"{report.empty} empty actions",
        f"{report.errors} failed or refused actions",
        f"{report.blank} with an empty placeholder",
    ]
    for domain, tools in sorted(report.yields.items()):
        rows = ", ".join(f"{tool} {count:,}" for tool, count in sorted(tools.items()))
        line = f"{domain}: {sum(tools.values()):,} rows ({rows or 'no action became one'})"
        console.say(line)
    console.print(f"{'; '.join(left_out)}.", highlight=False)
    console.say(f"In {settings.out}")
    _put(settings.out, settings.upload, console)
    return 0


def _choice(settings: RowSettings, *names: str) -> Choice:
    from ..sft_building.per_tool import Choice

    shown = {"form", "context", "notes", "characters"}
    return Choice(**settings.model_dump(include={*shown, *names}))


def _check_upload(target: str | None) -> None:
    if target is not None:
        from ..publishing.models import check_target

        check_target(target)


def _put(folder: Path, target: str | None, console: Console) -> None:
    if target is not None:
        from ..publishing.models import upload

        upload(folder, target, on_progress=lambda address: console.say(f"Uploaded {address}"))


def _table(summary: dict[str, dict[str, int]]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("tool")
    for name in ("train", "val"):
        table.add_column(name, justify="right")
    for tool, counts in summary.items():
        table.add_row(tool, *(f"{counts[name]:,}" for name in ("train", "val")))
    return table


_PREVIEW = """Shows the first rows of each tool that `sft build` would make from unified
trajectories, and which tools have no template; or, of a folder that `sft build` wrote, the first
rows of each tool there. Nothing is written."""


class PreviewSettings(RowSettings):
    tool: str | None = None
    """Show only rows of this tool; unset: of every tool."""
    n: PositiveInt = 1
    """Rows to show for each tool."""
    trajectories: PositiveInt = 1000
    """Maximum number of trajectories to read."""
    width: int = Field(default=1000, ge=20)
    """Characters to show of each instruction and output."""
    as_json: bool = False
    """Print only the full rows as JSONL, in the order of the trajectories."""


PREVIEW = CommandSpec(
    "sft preview",
    _PREVIEW,
    PreviewSettings,
    usage="SOURCE...",
    arguments=("sources",),
    aliases={"unified_glob": "sources", "root": "sources", "limit": "n"},
)


def run_preview(argv: list[str]) -> int:
    """Returns 1 if there are no rows."""
    with lean_imports():
        from envserver.cli.console import Console

        from ..sft_building import as_line

    settings = PREVIEW.read(argv)
    rows, tools, made = _rows(settings)
    if settings.as_json:
        sys.stdout.write("".join(as_line(row).decode() for row in rows))
        return 0 if rows else 1
    console = Console()
    for row in rows:
        _show_row(console, row, settings.width)
    bare = [f"{tool} ({count})" for tool, count in tools.most_common() if tool not in made]
    counts = ", ".join(f"{tool} ({count})" for tool, count in made.most_common())
    console.say(f"Rows: {counts or 'none'}.")
    if bare:
        console.say(f"Actions that became none: {', '.join(bare)}.")
    return 0 if rows else 1


def _rows(settings: PreviewSettings) -> tuple[list[Json], Counter[str], Counter[str]]:
    from ..sft_building.per_tool import read_templates, reward_of, rows_of
    from ..trajectories import objects

    templates = read_templates(settings.templates)
    choice = _choice(settings)
    shown: list[Json] = []
    tools: Counter[str] = Counter()
    made: Counter[str] = Counter()
    read = 0
    for document in objects(settings.sources):
        rows: Iterable[Json]
        if _is_row(document.value):
            rows = [document.value]
        elif read == settings.trajectories:
            break
        else:
            read += 1
            reward = reward_of(document.value)
            if settings.min_reward is not None and (reward is None or reward < settings.min_reward):
                continue
            tools.update(_tools(document.value.get("actions")))
            rows = rows_of(document.value, templates, choice)
        for row in rows:
            made[row["tool"]] += 1
            if made[row["tool"]] <= settings.n and settings.tool in (None, row["tool"]):
                shown.append(row)
    return shown, tools, made


def _is_row(document: Json) -> bool:
    return "tool" in document and ("instruction" in document or "messages" in document)


def _tools(actions: Any) -> Iterable[str]:
    found = actions if isinstance(actions, list) else []
    return [str(action.get("tool")) for action in found if isinstance(action, dict)]


def _show_row(console: Console, row: Json, width: int) -> None:
    if "messages" in row:
        instruction, output = (message["content"] for message in row["messages"])
        place = f"{row['task_id']}, step {row['step']}"
    else:
        instruction, output = row["instruction"], row["output"]
        place = f"{row['meta']['task_id']}, step {row['meta']['step']}"
    console.rule(f"{row['tool']}: {place}".replace("[", "\\["), align="left")
    for name, text in (("instruction", instruction), ("output", output)):
        cut = text if len(text) <= width else f"{text[:width]} ... ({len(text)} characters)"
        console.print(f"{name}:", style="bold")
        console.say(cut)


_ENDS = """The rows are shuffled with the seed and split into OUT/train.jsonl, validation.jsonl
and test.jsonl; OUT/summary.json has the counts, and why rows were dropped."""


class PrepareSettings(Section):
    input: str
    """JSONL, JSON or Parquet file, a folder of them, or a data set on the hub (OWNER/NAME or
    OWNER/NAME:CONFIG). Can be given as the first argument."""
    out: Path
    """Output folder: new, empty, or written by an earlier run, which is replaced."""
    seed: int = 7
    """Shuffle seed."""
    val_ratio: float = Field(default=0.10, ge=0, lt=1)
    """Fraction of the rows used for validation, rounded down."""
    test_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Fraction of the rows used for test, rounded down; 0: no test file."""
    limit: PositiveInt | None = None
    """Maximum number of rows, taken from the start before the shuffle."""
    form: Literal["messages", "prompt"]
    """messages: conversations; prompt: {"prompt", "completion"}."""
    tokenizer: str | None = None
    """Folder or name of a tokenizer that applies its chat template to conversations of the form
    `prompt`; unset: they stay conversations, and the template is applied at training."""
    verify: bool
    """Keep only rows whose completion the environment of the same name scores as correct."""
    processes: PositiveInt = 2
    """Number of rows verified in parallel, each in its own process."""
    sandbox: SandboxConfig = SandboxConfig()
    upload: str | None = None
    """Also upload the folder: to a folder, a bucket (gs://bucket/prefix, any fsspec URL), or the
    hub (hf://datasets/OWNER/NAME)."""


class RouterSettings(PrepareSettings):
    input: str = "Alovestocode/Router-agent-data"
    out: Path = Path("data/sft-router")
    form: Literal["messages", "prompt"] = "prompt"
    verify: bool = False
    think: Literal["none", "outline"] = "none"
    """outline: start the completion with the row's outline between <think> and </think>."""


class MathSettings(PrepareSettings):
    input: str = "XenArcAI/MathX-5M"
    out: Path = Path("data/sft-math")
    test_ratio: float = Field(default=0.0, ge=0, lt=1)
    limit: int | None = Field(default=10_000, ge=1)
    form: Literal["messages", "prompt"] = "prompt"
    verify: bool = True


class CodeSettings(PrepareSettings):
    input: str = "OpenCoder-LLM/opc-sft-stage2:educational_instruct"
    out: Path = Path("data/sft-code")
    form: Literal["messages", "prompt"] = "messages"
    verify: bool = False


P = TypeVar("P", bound=PrepareSettings)


def _data_set(name: str, settings: type[P], summary: str) -> CommandSpec[P]:
    return CommandSpec(
        f"sft {name}",
        f"{summary} {_ENDS}",
        settings,
        usage="SOURCE",
        arguments=("input",),
        aliases={"output_dir": "out", "gcs_prefix": "upload"},
    )


ROUTER = _data_set(
    "router",
    RouterSettings,
    """Prepares queries and their plans for a router: the prompt asks for a plan of ten keys, the
completion is the plan as JSON. Rows with an incomplete plan are dropped.""",
)
MATH = _data_set(
    "math",
    MathSettings,
    """Prepares problems with worked solutions: a tutor's conversations. Only rows whose
solution boxes the expected answer are kept (needs the extra `math`; --verify false keeps
all).""",
)
CODE = _data_set(
    "code",
    CodeSettings,
    """Prepares instructions with their programs: conversations. --verify keeps only rows whose
program passes the row's tests.""",
)


def run_router(argv: list[str]) -> int:
    from ..sft_building.data_sets import example_of

    settings = ROUTER.read(argv)
    return _prepare("router", settings, functools.partial(example_of, think=settings.think))


def run_math(argv: list[str]) -> int:
    from ..sft_building.data_sets import math_example

    return _prepare("math", MATH.read(argv), math_example)


def run_code(argv: list[str]) -> int:
    from ..sft_building.data_sets import code_example

    return _prepare("code", CODE.read(argv), code_example)


def _prepare(name: str, settings: PrepareSettings, example_of: Callable[..., Any]) -> int:
    from envserver.cli.console import Console, reading_bar
    from envserver.cli.loop import configure_logs

    from ..sft_building.data_sets import Plan, prepare, rows_of, template_of

    configure_logs("warning")
    _check_upload(settings.upload)
    check = functools.partial(_scored_right, name, settings) if settings.verify else None
    plan = Plan(
        template=None if settings.tokenizer is None else template_of(settings.tokenizer),
        check=check,
        **settings.model_dump(include={"seed", "val_ratio", "test_ratio", "form"}),
    )
    with reading_bar("rows", None) as on_progress:
        summary = prepare(
            rows_of(settings.input, limit=settings.limit),
            example_of,
            settings.out,
            plan,
            source=settings.input,
            on_progress=lambda count: on_progress(count, 0),
        )
    console = Console()
    _show_summary(console, summary, settings.out)
    _put(settings.out, settings.upload, console)
    return 0


def _show_summary(console: Console, summary: Json, out: Path) -> None:
    counts = ", ".join(f"{name} {count:,}" for name, count in summary["counts"].items())
    lines = [
        f"{summary['rows']:,} rows of {summary['input']}: {counts}; {summary['dropped']:,} dropped"
    ]
    lines += [
        f"  {count:,} times: {reason}" for reason, count in summary["dropped_reasons"].items()
    ]
    lines.append(f"In {out}")
    for text in lines:
        console.say(text)


FULL = 0.999
"""Minimum reward that counts as the full reward, because rewards are floats."""


def _scored_right(name: str, settings: PrepareSettings, candidates: Path) -> Iterator[str | None]:
    """Yields for each line {"task": row, "response": text} why it is wrong, or None."""
    from envserver.cli.console import reading_bar
    from envserver.cli.loop import run_loop
    from envserver.running.python_api import spec_of
    from envserver.running.run_settings import ScoreSettings
    from envserver.running.scoring import run_score

    scores = candidates.with_name("scores.jsonl")
    own = {"processes": settings.processes, "sandbox": settings.sandbox}
    spec = spec_of(ScoreSettings, name, {"input": candidates, "out": scores, **own})
    size = candidates.stat().st_size
    with reading_bar("rows verified", size) as on_progress:
        run_loop(run_score(spec, lambda rows, share: on_progress(rows, int(share * size))))
    try:
        with scores.open("rb") as file:
            for line in file:
                yield _fault(json.loads(line))
    finally:
        scores.unlink()


def _fault(scored: dict[str, object]) -> str | None:
    error, reward = scored["error"], scored["reward"]
    if isinstance(error, str):
        kind, _, message = error.partition(": ")
        if kind == "config":
            raise ConfigError(message, hint="Or use --verify false to keep rows unverified.")
        return f"not verified: {kind}"
    if not isinstance(reward, (int, float)):
        return "not verified: no score"
    return None if reward >= FULL else "wrong by its own check"


_KEPT = """Answers are kept in OUT/groups.jsonl: after a stop or a crash --resume continues, and
repeats only the requests that were in flight. OUT/rows.jsonl has the rows at the end."""

_GENERATE_ALIASES = {
    "queries": "env.data_path",
    "teacher": "openai.model_name",
    "k": "env.group_size",
    "profile": "env.profile",
    "retries": "env.repair",
    "skip_bad": "env.skip_bad",
    "limit": "env.total_steps",
}


class GenerateSettings(Settings):
    out: Path
    """Output folder."""
    resume: bool = False
    """Continue in an existing folder: requests that have an answer are not repeated."""
    overwrite: bool = False
    """Replace the files of an existing folder."""


class RouterGenerateSettings(GenerateSettings):
    out: Path = Path("data/router-plans")
    rows: PositiveInt | None = None
    """Maximum number of rows; unset: all that are usable."""
    balance: Literal["none", "route", "difficulty", "both"] = "none"
    """Choose the rows (`rows`) so that routes, difficulties, or both together are equally
    frequent, as far as there are enough."""
    balance_seed: int = 7
    """Seed of that choice."""


class SolutionSettings(GenerateSettings):
    out: Path = Path("data/solutions")
    per_group: Literal["all", "best", "shortest"] = "shortest"
    """Which correct solutions of a problem to keep: all different ones, or one."""


_FREQUENT = (*ENGINE, *SAMPLING, "rollouts.max_concurrent", "prices.prompt", "prices.completion")
_OUTPUT = ("out", "resume", "overwrite")

GENERATE_ROUTER = CommandSpec(
    "sft router generate",
    f"""Lets a teacher write plans for queries, in strict JSON; the environment `router` checks
them by schema and as graphs. Each query and each plan occurs once.
{_KEPT}
`envserver sft router OUT/rows.jsonl` splits them. Several teachers, each with an equal share:
--teacher A,B@http://host:8000/v1. Here the defaults of --k (tries of a query), --retries (of an
invalid plan) and --sampling.max_tokens are 1, 2 and 4096.""",
    RouterGenerateSettings,
    usage="--queries FILE --teacher MODEL",
    aliases=_GENERATE_ALIASES,
    environment="router",
    frequent=(
        *(*_OUTPUT, "rows", "balance", "env.group_size", "env.total_steps"),
        *_FREQUENT,
    ),
    openai_variables="openai",
)


def _solutions(name: str, checked: str) -> CommandSpec[SolutionSettings]:
    return CommandSpec(
        f"sft {name} generate",
        f"""Lets a teacher try each problem of the environment `{name}` k times (8) and keeps the
conversations with a correct answer, {checked}: rejection sampling.
{_KEPT}
It is `process --env {name} --env.group_size K`, then `export --to messages --min_reward 1
--per_group shortest --dedupe`.""",
        SolutionSettings,
        usage="--queries FILE --teacher MODEL --k K",
        aliases=_GENERATE_ALIASES,
        environment=name,
        frequent=(
            *(*_OUTPUT, "per_group", "env.group_size", "env.total_steps"),
            *_FREQUENT,
        ),
        openai_variables="openai",
    )


GENERATE_MATH = _solutions("math", "compared by the math scorer")
GENERATE_CODE = _solutions("code", "run against the problem's tests in a sandbox")

G = TypeVar("G", bound=GenerateSettings)

_PLANS: Json = {"data_set": "queries", "profile": "coursegpt", "group_size": 1, "repair": 2}
_TRIES: Json = {"group_size": 8, "mode": "single"}
_LONG_ANSWERS: Json = {"max_tokens": 4096}


def run_generate_router(argv: list[str]) -> int:
    """Returns 1 if it made no rows, 130 if it was stopped early."""
    settings = _read(GENERATE_ROUTER, argv, _PLANS)
    if settings.balance != "none" and settings.rows is None:
        raise UsageError("--balance needs --rows N, the number of rows that are chosen.")
    if settings.resume:
        _check_profile(settings)
    if _generate(_with_teachers(settings)).stopped:
        return 130
    return 0 if _write_plans(settings) else 1


def _check_profile(settings: RouterGenerateSettings) -> None:
    """Refuses a folder with plans of another profile: all rows have the same keys."""
    from envserver.export.stored import read_groups

    path, profile = _groups(settings), dict(settings.env)["profile"]
    first = next(read_groups([str(path)]), None) if path.exists() else None
    if first is not None and first.public.get("profile") != profile:
        raise ConfigError(
            f"{path} has plans of another profile than {profile!r}.",
            hint="Use the earlier --profile, or choose another --out.",
        )


def run_generate_math(argv: list[str]) -> int:
    return _solve(GENERATE_MATH, argv)


def run_generate_code(argv: list[str]) -> int:
    return _solve(GENERATE_CODE, argv)


def _solve(command: CommandSpec[SolutionSettings], argv: list[str]) -> int:
    from . import export

    settings = _read(command, argv, _TRIES)
    if _generate(settings).stopped:
        return 130
    words = [str(_groups(settings)), "--to", "messages", "--out", str(settings.out / "rows.jsonl")]
    words += ["--min_reward", str(FULL), "--per_group", settings.per_group]
    return export.run_export([*words, "--dedupe", "true", "--overwrite", "true"])


def _read(command: CommandSpec[G], argv: list[str], environment: Mapping[str, Any]) -> G:
    """Reads the settings. A teacher called "sim" is the simulated engine, as everywhere."""
    from envserver.cli.loop import show_logs
    from envserver.running.engines import SIMULATED

    defaults = {"env": environment, "sampling": _LONG_ANSWERS}
    settings = command.read(argv, defaults=defaults)
    if settings.openai.model_name == SIMULATED:
        settings = settings.model_copy(update={"model": SIMULATED})
    show_logs(settings)
    return settings


def _with_teachers(settings: RouterGenerateSettings) -> RouterGenerateSettings:
    """Makes each further teacher of `A,B@http://host:8000/v1` an agent; the first has the run's
    engine."""
    found = [re.fullmatch(r"\s*(.+?)(?:@(https?://.+?))?\s*", part) for part in
             settings.openai.model_name.split(",")]  # fmt: skip
    teachers = [(teacher[1], teacher[2]) for teacher in found if teacher is not None]
    if len(teachers) < len(found):
        raise ConfigError("--teacher: a name is missing between two commas.")
    first, url = teachers[0]
    openai = {"model_name": first} | ({} if url is None else {"base_url": url})
    env = settings.env
    if len(teachers) > 1:
        agents = {**env.agents}
        for number, (model, url) in enumerate(teachers[1:], 2):
            own = {"model_name": model}
            if url is not None:
                own |= {"base_url": url, "server_type": settings.openai.server_type}
            known = agents.get(f"teacher_{number}", AgentConfig())
            agents[f"teacher_{number}"] = known.model_copy(update=own)
        env = env.model_copy(update={"teachers": len(teachers), "agents": agents})
    return settings.model_copy(
        update={"env": env, "openai": settings.openai.model_copy(update=openai)}
    )


def _generate(settings: GenerateSettings) -> GroupRun:
    with lean_imports():
        from envserver.cli.console import Console
        from envserver.cli.loop import SignalStop, run_loop
        from envserver.cli.progress import ProgressView, show_result
        from envserver.registry import find
        from envserver.rollouts.stream import group_requests
        from envserver.running.group_run import GroupRun, Part
        from envserver.running.mix import RunSpec, alone

    name = str(settings.environment)
    spec: RunSpec[Any] = RunSpec(settings, name, find(name))
    member = alone(spec)
    environment = member.environment
    part = Part(
        **vars(member),
        path=_groups(settings),
        requests=group_requests(environment, repeat=False),
        groups=environment.config.total_steps,
    )
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    run = GroupRun(
        [part],
        settings,
        resume=settings.resume,
        overwrite=settings.overwrite,
        expected=environment.config.total_steps,
        show=partial(ProgressView, console),
        stop=SignalStop(console.say),
    )
    try:
        run_loop(run.run())
    finally:
        if run.tally.rollouts or run.tally.failures:
            show_result(console, run, settings)
    if run.stopped:
        console.print("Stopped early; run the same command with --resume to continue.")
    elif lost := run.tally.drops.total():
        console.print(f"{lost:,} without an answer: the same command with --resume tries again.")
    return run


def _write_plans(settings: RouterGenerateSettings) -> int:
    """Writes rows.jsonl and summary.json; returns the number of rows."""
    from envserver.cli.console import Console

    from ..sft_building import write_summary
    from ..sft_building.data_sets import Selection, write_plans

    path = settings.out / "rows.jsonl"
    selection = Selection(settings.rows, settings.balance, settings.balance_seed)
    summary = write_plans(_groups(settings), path, selection)
    write_summary(settings.out / "summary.json", summary)
    console = Console()
    lines = [f"{summary['rows']:,} rows of {summary['groups']:,} queries"]
    lines += [f"  {count:,} times: {reason}" for reason, count in summary["dropped"].items()]
    for name in ("routes", "difficulties", "spent"):
        counts = ", ".join(f"{key} {count:,}" for key, count in summary[name].items())
        lines += [f"{name}: {counts}"] if counts else []
    for text in [*lines, f"In {path}"]:
        console.say(text)
    return int(summary["rows"])


def _groups(settings: GenerateSettings) -> Path:
    return settings.out / "groups.jsonl"
