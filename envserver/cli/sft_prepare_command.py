"""`envserver sft router|math|code SOURCE`: prepares a data set for fine-tuning.

The work is in `envserver_factory.sft_building`; the environment of the same name checks whether a
row's answer is correct (`sft_checks`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .command_line import CommandSpec
from .console import Console
from .logs import configure_logs
from .reading_bar import reading_bar
from .sft_build_command import check_upload, put
from .specs.sft_prepare_command import (
    CODE,
    MATH,
    ROUTER,
    CodeSettings,
    MathSettings,
    PrepareSettings,
    RouterSettings,
)

P = TypeVar("P", bound=PrepareSettings)
_ExampleOf = Callable[[P], Callable[[dict[str, Any]], Any]]


def run_router(argv: list[str]) -> int:
    """Runs `sft router`; see `_prepare`."""
    return _prepare(ROUTER, _router, argv)


def run_math(argv: list[str]) -> int:
    """Runs `sft math`; see `_prepare`."""
    return _prepare(MATH, _math, argv)


def run_code(argv: list[str]) -> int:
    """Runs `sft code`; see `_prepare`."""
    return _prepare(CODE, _code, argv)


def _prepare(command: CommandSpec[P], example_of: _ExampleOf[P], argv: list[str]) -> int:
    """Prepares a data set.

    Args:
        example_of: settings -> function that converts a row.
    """
    from envserver_factory.sft_building.examples import rows_of, template_of
    from envserver_factory.sft_building.prepare import Plan, prepare

    settings = command.read(argv)
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
    from envserver_factory.sft_building.router import example_of

    return functools.partial(example_of, think=settings.think)


def _math(settings: MathSettings) -> Callable[[dict[str, Any]], Any]:
    from envserver_factory.sft_building.examples import math_example

    return math_example


def _code(settings: CodeSettings) -> Callable[[dict[str, Any]], Any]:
    from envserver_factory.sft_building.examples import code_example

    return code_example


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
        console.say(text)
