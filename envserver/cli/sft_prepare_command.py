"""`envserver sft router|math|code SOURCE`: a data set prepared for fine-tuning.

Their settings and what they show; the work is done in `export/sft_building`, whether a row's answer
is right says the environment of the same name (`sft_checks`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field
from rich.console import Console

from ..config import SandboxConfig, Section
from .command_line import CommandSpec
from .logs import configure_logs
from .reading_bar import reading_bar
from .sft_build_command import check_upload, put

ALIASES = {"output_dir": "out", "gcs_prefix": "upload"}

_ENDS = """The rows are shuffled by the seed and split into OUT/train.jsonl, validation.jsonl and
test.jsonl; OUT/summary.json counts them and says what was dropped, and why."""


class PrepareSettings(Section):
    """What `sft router`, `sft math` and `sft code` have in common."""

    input: str
    """JSONL, JSON or Parquet file, a folder of them, or a data set on the hub (OWNER/NAME or
    OWNER/NAME:CONFIG); may be the first word."""
    out: Path
    """Folder for the files; it is new, or empty, or one that was prepared before and is
    replaced."""
    seed: int
    """Of the shuffle."""
    val_ratio: float = Field(default=0.10, ge=0, lt=1)
    """Share of the rows that is validation, rounded down."""
    test_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Share of the rows that is test, rounded down; 0: no such file."""
    limit: int | None = Field(default=None, ge=1)
    """Only so many rows, the first ones, taken before the shuffle."""
    form: Literal["messages", "prompt"]
    """messages: conversations; prompt: {"prompt", "completion"}."""
    tokenizer: str | None = None
    """Folder or name of a tokenizer: conversations of the form `prompt` are written as its chat
    template has them; unset: they stay conversations, the template is applied when training."""
    verify: bool
    """Keep only rows whose completion the environment of this name scores as right."""
    processes: int = Field(default=2, ge=1)
    """Rows that are verified at a time, each in a process."""
    sandbox: SandboxConfig = SandboxConfig()
    upload: str | None = None
    """Also put the folder there: a folder, a bucket (gs://bucket/prefix, any fsspec URL), or the
    hub (hf://datasets/OWNER/NAME)."""


class RouterSettings(PrepareSettings):
    """The settings that `sft router` has."""

    input: str = "Alovestocode/Router-agent-data"
    out: Path = Path("data/sft-router")
    seed: int = 7
    form: Literal["messages", "prompt"] = "prompt"
    verify: bool = False
    think: Literal["none", "outline"] = "none"
    """outline: the completion begins with the row's outline between <think> and </think>."""


class MathSettings(PrepareSettings):
    """The settings that `sft math` has."""

    input: str = "XenArcAI/MathX-5M"
    out: Path = Path("data/sft-math")
    seed: int = 7
    test_ratio: float = Field(default=0.0, ge=0, lt=1)
    limit: int | None = Field(default=10_000, ge=1)
    form: Literal["messages", "prompt"] = "prompt"
    verify: bool = True


class CodeSettings(PrepareSettings):
    """The settings that `sft code` has."""

    input: str = "OpenCoder-LLM/opc-sft-stage2:educational_instruct"
    out: Path = Path("data/sft-code")
    seed: int = 7
    form: Literal["messages", "prompt"] = "messages"
    verify: bool = False


P = TypeVar("P", bound=PrepareSettings)
_ExampleOf = Callable[[P], Callable[[dict[str, Any]], Any]]

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


def run_router(argv: list[str]) -> int:
    """`sft router`; see `_prepare`."""
    return _prepare(ROUTER, _router, argv)


def run_math(argv: list[str]) -> int:
    """`sft math`; see `_prepare`."""
    return _prepare(MATH, _math, argv)


def run_code(argv: list[str]) -> int:
    """`sft code`; see `_prepare`."""
    return _prepare(CODE, _code, argv)


def _prepare(command: CommandSpec[P], example_of: _ExampleOf[P], argv: list[str]) -> int:
    """Prepares a data set.

    Args:
        example_of: settings -> what a row becomes.

    Raises:
        UsageError: a setting or the input is wrong, or no row is of use.
        StoreError: the folder cannot be written.
    """
    from ..export.sft_building.data_rows import rows_of
    from ..export.sft_building.examples import template_of
    from ..export.sft_building.prepare import Plan, prepare

    settings = command.read(argv)
    if settings is None:
        return 0
    configure_logs("warning")
    check_upload(settings.upload)
    plan = Plan(
        seed=settings.seed,
        val_ratio=settings.val_ratio,
        test_ratio=settings.test_ratio,
        form=settings.form,
        template=None if settings.tokenizer is None else template_of(settings.tokenizer),
        check=_check(command.name.rpartition(" ")[2], settings) if settings.verify else None,
    )
    with reading_bar("rows", None) as told:
        summary = prepare(
            rows_of(settings.input, limit=settings.limit),
            example_of(settings),
            settings.out,
            plan,
            source=settings.input,
            told=lambda count: told(count, 0),
        )
    console = Console()
    _show(console, summary, settings.out)
    if settings.upload is not None:
        put(settings.out, settings.upload, console)
    return 0


def _check(name: str, settings: PrepareSettings) -> Callable[[Path], Any]:
    from .sft_checks import scored_right

    return functools.partial(
        scored_right, name, processes=settings.processes, sandbox=settings.sandbox
    )


def _router(settings: RouterSettings) -> Callable[[dict[str, Any]], Any]:
    from ..export.sft_building.router import example_of

    return functools.partial(example_of, think=settings.think)


def _math(settings: MathSettings) -> Callable[[dict[str, Any]], Any]:
    from ..export.sft_building.math_rows import example_of

    return example_of


def _code(settings: CodeSettings) -> Callable[[dict[str, Any]], Any]:
    from ..export.sft_building.code_rows import example_of

    return example_of


def _show(console: Console, summary: dict[str, Any], out: Path) -> None:
    counts = ", ".join(f"{name} {count:,}" for name, count in summary["counts"].items())
    lines = [
        f"{summary['rows']:,} rows of {summary['input']}: {counts}; {summary['dropped']:,} dropped"
    ]
    lines += [
        f"  {count:,} times: {reason}" for reason, count in summary["dropped_reasons"].items()
    ]
    lines.append(f"In {out}")
    for text in lines:
        console.print(text, highlight=False, markup=False, soft_wrap=True)
