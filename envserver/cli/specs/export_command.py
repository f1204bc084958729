"""The settings of `envserver export`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from ...config import LogLevel, Section
from ..command_line import CommandSpec

SUMMARY = """Writes stored rollouts in another form, those that you want, with checksums:
`envserver export FILE... --to messages --out FOLDER`. The export appears whole or not at all."""


class ExportSettings(Section):
    """The settings that `export` has."""

    source: list[str] = Field(default_factory=list)
    """Files of `process` (.jsonl, .gz, .zst), folders or globs of them, `-`, a store (SQLite file
    or postgresql:// URL), or a running server; may stand first, without the flag."""
    to: str
    """The form: atropos (groups), messages (chats for SFT), unified (readable records), dpo
    (pairs), traces, parquet (typed columns) or html (pages)."""
    out: Path
    """A folder; or a file, where it ends in .jsonl or like the form's own files."""
    where: str | None = None
    """Only rollouts of which this is true, such as "reward >= 0.8 and turns < 6 and 'lossy_detok'
    not in flags"; names are env, task_id, model, reward, components['...'], length (tokens),
    sampled, turns, flags, limit, truncated, finish_reason, split, policy_version, messages ..."""
    min_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Only rollouts of at least this reward."""
    per_group: Literal["all", "best", "shortest"] = "all"
    """Of what is left of each group: all, the one of the highest reward, or the shortest."""
    dedupe: bool = False
    """Leave out rollouts that say the same as one before."""
    against: list[str] = Field(default_factory=list)
    """Evaluation sets (.jsonl, .json, .txt, or folders): rollouts with a piece of one are left
    out."""
    against_words: int = Field(default=13, ge=2, le=1000)
    """Words in a row that make a piece."""
    shard_rows: int = Field(default=50_000, ge=1)
    """Most rows of a shard (part-00000.jsonl, ...)."""
    tokens: bool = False
    """Unified records with their training rows, too."""
    jsonl: bool = False
    """Unified records and traces as lines of shards, not as a file for each."""
    label: str = "auto"
    """Of traces; auto: solved, partial or failed."""
    embed: str = ""
    """Add an embedding of its text to each step of traces: a model of sentence-transformers (extra
    `embeddings`); unset: none."""
    embed_cache: Path = Path("data/embeddings")
    """Folder where embeddings are kept by their text and model."""
    margin: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Least difference of the rewards of a pair (dpo)."""
    title: str = ""
    """Of what is exported, for people."""
    tokenizer: str = ""
    """What tokens are shown by in pages: a folder with tokenizer.json, or a model in the cache;
    unset: by the model's name."""
    push_to_hub: str | None = None
    """OWNER/NAME of a data set on the Hugging Face hub: the folder gets a data card and is pushed
    there, private if it is new; HF_TOKEN is sent."""
    dry_run: bool = False
    """With --push_to_hub: write the folder as it would be pushed, and push nothing."""
    overwrite: bool = False
    """Replace an export that is there."""
    skip_bad: bool = False
    """Pass over lines that are no groups, and count them."""
    log_level: LogLevel = "warning"
    """Least serious event that is logged."""


COMMAND = CommandSpec(
    "export",
    SUMMARY,
    ExportSettings,
    usage="SOURCE... --to FORMAT --out PLACE",
    arguments=("source",),
)
