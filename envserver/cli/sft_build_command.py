"""`envserver sft build SOURCE...`: its settings and what it shows; see `export/sft_building`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from rich.console import Console
from rich.table import Table

from ..config import Section
from .command_line import CommandSpec
from .reading_bar import reading_bar

SUMMARY = """Makes rows for supervised fine-tuning from unified trajectories, one folder for each
tool that has a template: OUT/TOOL/train.jsonl, OUT/TOOL/val.jsonl and OUT/SUMMARY.json. A row is
{"tool", "instruction", "output", "meta"}. The same files, templates and seed give the same rows."""


class RowSettings(Section):
    """What `build` and `preview` have in common."""

    sources: list[str]
    """Files, folders and globs of unified trajectories; may be the first words."""
    templates: Path = Path("configs/sft_templates.yaml")
    """YAML file: which tools become rows, and how."""
    min_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Only trajectories with at least this reward; one without a reward is left out then."""
    context: bool = False
    """Fill {context} with the outputs of the actions before; off, it is empty, as in the original
    script."""
    notes: bool = False
    """Fill {notes} with the outputs of earlier hops; off, it is empty."""
    characters: int = Field(default=4000, ge=1)
    """The most characters of {context} and of {notes}: the last ones."""
    form: Literal["rows", "messages"] = "rows"
    """rows: instruction and output; messages: the same as a conversation."""


class BuildSettings(RowSettings):
    """The settings that `sft build` has."""

    out: Path = Path("data/sft")
    """Folder for the rows; it is new, or empty, or one that was built before and is replaced."""
    seed: int = 123
    """Of the shuffle."""
    val_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Share of each tool's rows that is held out, rounded down, but at least one row."""
    strict_split: bool = False
    """The lone row of a tool is trained on; else it is in both files, as in the original script."""
    group_by: Literal["task_id"] | None = None
    """task_id: all rows of a task stand on one side, over all tools."""
    upload: str | None = None
    """Also put the folder there: a folder, a bucket (gs://bucket/prefix, any fsspec URL), or the
    hub (hf://datasets/OWNER/NAME)."""


COMMAND = CommandSpec(
    "sft build",
    SUMMARY,
    BuildSettings,
    usage="SOURCE...",
    arguments=("sources",),
    aliases={"unified_glob": "sources"},
)


def run(argv: list[str]) -> int:
    """The command; `argv` begins with its own word.

    Raises:
        UsageError: a setting or a source is wrong, or nothing became a row.
        StoreError: the folder cannot be written.
    """
    from ..export.documents import files_of
    from ..export.sft_building.per_tool import Choice, build
    from ..export.sft_building.templates import Shown, read_templates

    settings = COMMAND.read(argv)
    if settings is None:
        return 0
    check_upload(settings.upload)
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
    with reading_bar("trajectories", size) as told:
        report = build(settings.sources, templates, settings.out, choice, told=told)
    console = Console()
    console.print(_table(report.summary))
    left_out = [
        f"{report.read} trajectories read",
        f"{report.below} below the least reward",
        f"{report.without_template} actions without a template",
        f"{report.empty} that say nothing",
    ]
    console.print(f"{'; '.join(left_out)}.", highlight=False)
    console.print(f"In {settings.out}", highlight=False, markup=False, soft_wrap=True)
    if settings.upload is not None:
        put(settings.out, settings.upload, console)
    return 0


def check_upload(target: str | None) -> None:
    """Before any work: can this be a target?

    Raises:
        ConfigError: it cannot be one, or a library for it is not installed.
    """
    if target is not None:
        from ..export.sft_building.upload import check_target

        check_target(target)


def put(folder: Path, target: str, console: Console) -> None:
    """Uploads a finished folder, and says where each file is."""
    from ..export.sft_building.upload import upload

    def told(address: str) -> None:
        console.print(f"Put {address}", highlight=False, markup=False, soft_wrap=True)

    upload(folder, target, told=told)


def _table(summary: dict[str, dict[str, int]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("tool")
    for name in ("train", "val"):
        table.add_column(name, justify="right")
    for tool, counts in summary.items():
        table.add_row(tool, *(f"{counts[name]:,}" for name in ("train", "val")))
    return table
