"""Commands that measure models: `evaluate` and its subcommands `compare`, `merge` and `report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import Field

from ..running.run_settings import EvaluateSettings
from ..settings.config import PricesConfig
from ..settings.runs import Failures, Truncated
from ..settings.section import Finite, Natural, Section
from . import lean_imports
from .command_line import FREQUENT, CommandSpec

if TYPE_CHECKING:
    from ..evaluation.comparison import Comparison


SUMMARY = """Measures a model on the tasks of an environment, of several (--env math,code) or of a
folder of them (--env DIR): mean reward, pass@k and pass^k with intervals, overall and by kind of
task, next to the environment's baselines; failures, truncations, tokens and cost. Tasks come from
the split `test` unless another is given: `--env.total_steps` of them or all, each once, with
`--env.group_size` attempts each (unset: 1 if sampling.temperature is 0). No group is filtered.
Groups and the report (report.json, report.md, report.html) are written to --out.
To compare two evaluations: envserver evaluate compare DIR DIR
To evaluate on several machines: --shard 1/4 and so on, then envserver evaluate merge DIR DIR ...
To write the report again, without a model: envserver evaluate report DIR
For tasks of lm-evaluation-harness: envserver lm-eval TASKS"""

COMMAND = CommandSpec(
    "evaluate",
    SUMMARY,
    EvaluateSettings,
    usage="--env NAME[,NAME...]|FOLDER",
    frequent=(*FREQUENT, "out", "resume", "overwrite", "pass_at", "no_baselines", "ray.address"),
    aliases={"ray": "ray.address"},
    openai_variables="openai",
)


def run(argv: list[str]) -> int:
    with lean_imports():
        from ..running.evaluating import evaluate_members
        from ..running.python_api import choice_of
        from .console import Console
        from .evaluating import Shown, read_members
        from .loop import SignalStop, run_loop, show_logs

    members = read_members(COMMAND, argv)
    settings = members[0].settings
    show_logs(settings)
    console = Console(stderr=True)
    stop = SignalStop(console.print)
    work = evaluate_members(members, choice_of(settings), view=Shown(console), stop=stop)
    done = run_loop(work)
    return 130 if done.stopped else 0


_COMPARE = """Compares two evaluations: folders of `evaluate` or `lm-eval`, or JSONL files of
`process`. Tasks are paired by environment and id. The output has the difference B - A with its
interval, an exact paired test, and the tasks that differ most. Tasks that only one of them has
are listed and left out. Both are counted by the same rules, from their groups."""


class CompareSettings(Section):
    a: Path
    """The baseline run (the old one). Can be given as the first argument."""
    b: Path
    """The run to compare with the baseline (the new one). Can be given as the second argument."""
    out: Path | None = None
    """Folder for comparison.json, comparison.md and comparison.html; unset: no files are
    written."""
    pass_at: Finite | None = None
    """Minimum reward of an attempt that passes; unset: as in A. The same holds for `failures`
    and `truncated`."""
    failures: Failures | None = None
    """Whether attempts lost to infrastructure failures are left out (drop) or count as 0 (zero)."""
    truncated: Truncated | None = None
    """Whether truncated attempts count with their score (score), as 0 (zero), or are left out
    (drop)."""
    seed: Natural = 0
    """Seed for the intervals, and for random signs if an exact test would take too long."""
    as_json: bool = False
    """Print the comparison as one JSON object."""


COMPARE = CommandSpec(
    "evaluate compare", _COMPARE, CompareSettings, usage="A B", arguments=("a", "b")
)


def run_compare(argv: list[str]) -> int:
    with lean_imports():
        from ..evaluation.comparison import compare
        from ..evaluation.folders import View, called_alike, read_run
        from ..evaluation.tables import comparison_notes, comparison_tables, verdicts_of
        from .console import Console, show_json
        from .evaluating import show_tables

    settings = COMPARE.read(argv)
    view = View(pass_at=settings.pass_at, failures=settings.failures, truncated=settings.truncated)
    a = read_run(settings.a, view)
    b = called_alike(a, read_run(settings.b, view))
    rules = msgspec.structs.replace(next(iter(a.values())).rules, seed=settings.seed)
    found = compare(a, b, rules, names=_names(settings.a, settings.b))
    if settings.out is not None:
        _write(settings.out, found)
    if settings.as_json:
        show_json(found)
        return 0
    console = Console()
    for verdict in verdicts_of(found):
        console.say(verdict, style="bold")
    show_tables(console, comparison_tables(found), comparison_notes(found))
    if settings.out is not None:
        console.say(f"Written to {settings.out}")
    return 0


def _names(a: Path, b: Path) -> tuple[str, str]:
    """The folder names if they differ, the paths otherwise, A and B for the same path."""
    ours, theirs = a.resolve().parts, b.resolve().parts
    if ours[-1] != theirs[-1]:
        return ours[-1], theirs[-1]
    return ("A", "B") if ours == theirs else (str(a), str(b))


def _write(folder: Path, found: Comparison) -> None:
    from ..evaluation.page import comparison_page
    from ..evaluation.tables import comparison_markdown
    from ..export.unified import write_json
    from ..running.evaluation_folder import write_text

    facts: Any = msgspec.to_builtins(found, str_keys=True)
    write_json(folder / "comparison.json", facts)
    write_text(folder / "comparison.md", comparison_markdown(found))
    write_text(folder / "comparison.html", comparison_page(found))


_MERGE = """Merges the shards of an evaluation, which `evaluate --shard 1/4` and so on made, perhaps
on several machines. The report equals that of a single run over all tasks. Shards with other
settings or another model, a task that is in two of them, and missing or unfinished shards are
refused."""


class MergeSettings(Section):
    shards: list[Path] = Field(default_factory=list)
    """Folders of the shards; may be given without the flag."""
    out: Path
    """Folder for the merged groups and the report."""
    slices: list[str] = Field(default_factory=list)
    """Environment settings in which shards may differ, such as data_path where each evaluated a
    file of its own."""
    partial: bool = False
    """Accept that shards are missing or unfinished; the report says that it is incomplete."""
    overwrite: bool = False
    """Replace an evaluation in the output folder."""


MERGE = CommandSpec(
    "evaluate merge",
    _MERGE,
    MergeSettings,
    usage="SHARD SHARD ... --out DIR",
    arguments=("shards",),
)


def run_merge(argv: list[str]) -> int:
    with lean_imports():
        from ..running.evaluation_folder import Accepted, merge_evaluations
        from .console import Console
        from .evaluating import show_report

    settings = MERGE.read(argv)
    accepted = Accepted(tuple(settings.slices), settings.partial)
    report = merge_evaluations(
        settings.shards, settings.out, accepted, overwrite=settings.overwrite
    )
    show_report(Console(stderr=True), report, settings.out)
    return 0


_REPORT = """Writes the report of an evaluation again (report.json, report.md, report.html), from
the groups in its folder and without a model. The report is the same byte for byte unless a
setting changes how attempts are counted."""


class ReportSettings(Section):
    folder: Path
    """Folder of the evaluation. Can be given as the first argument."""
    pass_at: Finite | None = None
    """Minimum reward of an attempt that passes; unset: as in the evaluation. The same holds for
    `failures` and `truncated`."""
    failures: Failures | None = None
    """Whether attempts lost to infrastructure failures are left out (drop) or count as 0 (zero)."""
    truncated: Truncated | None = None
    """Whether truncated attempts count with their score (score), as 0 (zero), or are left out
    (drop)."""
    prices: PricesConfig = PricesConfig()
    models_file: Path = Path("configs/models.yaml")
    """YAML file that may contain prices of models."""


REPORT = CommandSpec(
    "evaluate report", _REPORT, ReportSettings, usage="FOLDER", arguments=("folder",)
)


def run_report(argv: list[str]) -> int:
    with lean_imports():
        from ..evaluation.folders import View
        from ..running.evaluation_folder import write_report
        from ..running.prices import pricing_of
        from .console import Console
        from .evaluating import show_report

    settings = REPORT.read(argv)
    view = View(
        pass_at=settings.pass_at,
        failures=settings.failures,
        truncated=settings.truncated,
        pricing=pricing_of(settings.prices, None, settings.models_file),
    )
    report = write_report(settings.folder, view)
    show_report(Console(stderr=True), report, settings.folder)
    return 0
