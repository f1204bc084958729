"""`envserver sft build`, `preview`, `router|math|code SOURCE`: rows for fine-tuning from data."""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from envserver_records.errors import ConfigError
from pydantic import Field

from envserver.cli import lean_imports
from envserver.cli.command_line import CommandSpec
from envserver.settings.config import SandboxConfig
from envserver.settings.section import Section

if TYPE_CHECKING:
    from rich.table import Table

    from envserver.cli.console import Console


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
    characters: int = Field(default=4000, ge=1)
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

        from ..sft_building.per_tool import Choice, Shown, build, read_templates
        from ..trajectories.documents import files_of

    settings = BUILD.read(argv)
    _check_upload(settings.upload)
    templates = read_templates(settings.templates)
    choice = Choice(
        seed=settings.seed,
        val_ratio=settings.val_ratio,
        strict_split=settings.strict_split,
        group_by=settings.group_by,
        min_reward=settings.min_reward,
        form=settings.form,
        shown=Shown(settings.context, settings.notes, settings.characters),
    )
    size = sum(path.stat().st_size for path in files_of(settings.sources))
    with reading_bar("trajectories", size) as on_progress:
        report = build(settings.sources, templates, settings.out, choice, on_progress=on_progress)
    console = Console()
    console.print(_table(report.summary))
    left_out = [
        f"{report.read} trajectories read",
        f"{report.below} below the minimum reward",
        f"{report.without_template} actions without a template",
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
    if settings.upload is not None:
        _put(settings.out, settings.upload, console)
    return 0


def _check_upload(target: str | None) -> None:
    if target is not None:
        from ..publishing.models import check_target

        check_target(target)


def _put(folder: Path, target: str, console: Console) -> None:
    from ..publishing.models import upload

    def on_progress(address: str) -> None:
        console.say(f"Uploaded {address}")

    upload(folder, target, on_progress=on_progress)


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
    n: int = Field(default=1, ge=1)
    """Rows to show for each tool."""
    trajectories: int = Field(default=1000, ge=1)
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

        from ..sft_building.folder import as_line

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


def _rows(settings: PreviewSettings) -> tuple[list[dict[str, Any]], Counter[str], Counter[str]]:
    from ..sft_building.per_tool import Choice, Shown, read_templates, reward_of, rows_of
    from ..trajectories.documents import objects

    templates = read_templates(settings.templates)
    choice = Choice(
        form=settings.form, shown=Shown(settings.context, settings.notes, settings.characters)
    )
    shown: list[dict[str, Any]] = []
    tools: Counter[str] = Counter()
    made: Counter[str] = Counter()
    read = 0
    for document in objects(settings.sources):
        rows: Iterable[dict[str, Any]]
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


def _is_row(document: dict[str, Any]) -> bool:
    return "tool" in document and ("instruction" in document or "messages" in document)


def _tools(actions: Any) -> Iterable[str]:
    found = actions if isinstance(actions, list) else []
    return [str(action.get("tool")) for action in found if isinstance(action, dict)]


def _show_row(console: Console, row: dict[str, Any], width: int) -> None:
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


ALIASES = {"output_dir": "out", "gcs_prefix": "upload"}

_ENDS = """The rows are shuffled with the seed and split into OUT/train.jsonl, validation.jsonl
and test.jsonl; OUT/summary.json has the counts, and why rows were dropped."""


class PrepareSettings(Section):
    input: str
    """JSONL, JSON or Parquet file, a folder of them, or a data set on the hub (OWNER/NAME or
    OWNER/NAME:CONFIG). Can be given as the first argument."""
    out: Path
    """Output folder: new, empty, or written by an earlier run, which is replaced."""
    seed: int
    """Shuffle seed."""
    val_ratio: float = Field(default=0.10, ge=0, lt=1)
    """Fraction of the rows used for validation, rounded down."""
    test_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Fraction of the rows used for test, rounded down; 0: no test file."""
    limit: int | None = Field(default=None, ge=1)
    """Maximum number of rows, taken from the start before the shuffle."""
    form: Literal["messages", "prompt"]
    """messages: conversations; prompt: {"prompt", "completion"}."""
    tokenizer: str | None = None
    """Folder or name of a tokenizer that applies its chat template to conversations of the form
    `prompt`; unset: they stay conversations, and the template is applied at training."""
    verify: bool
    """Keep only rows whose completion the environment of the same name scores as correct."""
    processes: int = Field(default=2, ge=1)
    """Number of rows verified in parallel, each in its own process."""
    sandbox: SandboxConfig = SandboxConfig()
    upload: str | None = None
    """Also upload the folder: to a folder, a bucket (gs://bucket/prefix, any fsspec URL), or the
    hub (hf://datasets/OWNER/NAME)."""


class RouterSettings(PrepareSettings):
    input: str = "Alovestocode/Router-agent-data"
    out: Path = Path("data/sft-router")
    seed: int = 7
    form: Literal["messages", "prompt"] = "prompt"
    verify: bool = False
    think: Literal["none", "outline"] = "none"
    """outline: start the completion with the row's outline between <think> and </think>."""


class MathSettings(PrepareSettings):
    input: str = "XenArcAI/MathX-5M"
    out: Path = Path("data/sft-math")
    seed: int = 7
    test_ratio: float = Field(default=0.0, ge=0, lt=1)
    limit: int | None = Field(default=10_000, ge=1)
    form: Literal["messages", "prompt"] = "prompt"
    verify: bool = True


class CodeSettings(PrepareSettings):
    input: str = "OpenCoder-LLM/opc-sft-stage2:educational_instruct"
    out: Path = Path("data/sft-code")
    seed: int = 7
    form: Literal["messages", "prompt"] = "messages"
    verify: bool = False


ROUTER = CommandSpec(
    "sft router",
    f"""Prepares queries and their plans for a router: the prompt asks for a plan of ten keys,
the completion is the plan as JSON. Rows whose plan is not whole are dropped. {_ENDS}""",
    RouterSettings,
    usage="SOURCE",
    arguments=("input",),
    aliases=ALIASES,
)

MATH = CommandSpec(
    "sft math",
    f"""Prepares problems with worked solutions: a tutor's conversations. Only rows whose
solution boxes the expected answer are kept (needs the extra `math`; --verify false keeps
all). {_ENDS}""",
    MathSettings,
    usage="SOURCE",
    arguments=("input",),
    aliases=ALIASES,
)

CODE = CommandSpec(
    "sft code",
    f"""Prepares instructions with their programs: conversations. --verify keeps only rows whose
program passes the row's tests. {_ENDS}""",
    CodeSettings,
    usage="SOURCE",
    arguments=("input",),
    aliases=ALIASES,
)

P = TypeVar("P", bound=PrepareSettings)
_ExampleOf = Callable[[P], Callable[[dict[str, Any]], Any]]


def run_router(argv: list[str]) -> int:
    return _prepare(ROUTER, _router, argv)


def run_math(argv: list[str]) -> int:
    return _prepare(MATH, _math, argv)


def run_code(argv: list[str]) -> int:
    return _prepare(CODE, _code, argv)


def _prepare(command: CommandSpec[P], example_of: _ExampleOf[P], argv: list[str]) -> int:
    from envserver.cli.console import Console, reading_bar
    from envserver.cli.loop import configure_logs

    from ..sft_building.examples import rows_of, template_of
    from ..sft_building.prepare import Plan, prepare

    settings = command.read(argv)
    configure_logs("warning")
    _check_upload(settings.upload)
    check = functools.partial(
        _scored_right,
        command.name.rpartition(" ")[2],
        processes=settings.processes,
        sandbox=settings.sandbox,
    )
    plan = Plan(
        seed=settings.seed,
        val_ratio=settings.val_ratio,
        test_ratio=settings.test_ratio,
        form=settings.form,
        template=None if settings.tokenizer is None else template_of(settings.tokenizer),
        check=check if settings.verify else None,
    )
    with reading_bar("rows", None) as on_progress:
        summary = prepare(
            rows_of(settings.input, limit=settings.limit),
            example_of(settings),
            settings.out,
            plan,
            source=settings.input,
            on_progress=lambda count: on_progress(count, 0),
        )
    console = Console()
    _show_summary(console, summary, settings.out)
    if settings.upload is not None:
        _put(settings.out, settings.upload, console)
    return 0


def _router(settings: RouterSettings) -> Callable[[dict[str, Any]], Any]:
    from ..sft_building.examples import example_of

    return functools.partial(example_of, think=settings.think)


def _math(settings: MathSettings) -> Callable[[dict[str, Any]], Any]:
    from ..sft_building.examples import math_example

    return math_example


def _code(settings: CodeSettings) -> Callable[[dict[str, Any]], Any]:
    from ..sft_building.examples import code_example

    return code_example


def _show_summary(console: Console, summary: dict[str, Any], out: Path) -> None:
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


def _scored_right(
    name: str, candidates: Path, *, processes: int, sandbox: SandboxConfig
) -> Iterator[str | None]:
    """Yields for each line {"task": row, "response": text} why it is wrong, or None."""
    from envserver.cli.console import reading_bar
    from envserver.cli.loop import run_loop
    from envserver.registry import find
    from envserver.running.scoring import run_score

    scores = candidates.with_name("scores.jsonl")
    config = find(name).Config().model_dump(mode="json")
    size = candidates.stat().st_size
    with reading_bar("rows verified", size) as on_progress:
        scoring = run_score(
            name,
            config,
            candidates,
            scores,
            processes=processes,
            sandbox=sandbox,
            progress=lambda rows, share: on_progress(rows, int(share * size)),
        )
        run_loop(scoring)
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
