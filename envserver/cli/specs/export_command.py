"""The settings of `envserver export`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from ...config import LogFormat, LogLevel, Section
from ..command_line import CommandSpec

SUMMARY = """Selects stored rollouts and writes them in another format, with checksums:
`envserver export FILE... --to messages --out FOLDER`. The export is atomic: it appears complete
or not at all."""


class ExportSettings(Section):
    """Settings of `export`."""

    source: list[str] = Field(default_factory=list)
    """Files of `process` (.jsonl, .gz, .zst), folders or globs of them, `-`, a store (SQLite
    file or postgresql:// URL), or a running server. Can be given as the first arguments."""
    to: str
    """The output format: atropos (groups), messages (chats for SFT), unified (readable records),
    dpo (pairs), traces, parquet (typed columns), html (pages) or inspect (logs that Inspect View
    opens; with the extra `inspect`)."""
    out: Path
    """Output folder; or a file if the name ends in .jsonl or in an extension of the format."""
    where: str | None = None
    """Keep only rollouts for which this expression is true, such as "reward >= 0.8 and turns < 6
    and 'lossy_detok' not in flags"; names are env, task_id, model, reward, components['...'],
    length (tokens), sampled, turns, flags, limit, truncated, finish_reason, split,
    policy_version, messages ..."""
    min_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Minimum reward of a rollout."""
    per_group: Literal["all", "best", "shortest"] = "all"
    """Which of the remaining rollouts of each group to keep: all, the one with the highest
    reward, or the shortest."""
    dedupe: bool = False
    """Leave out rollouts with the same text as an earlier one."""
    against: list[str] = Field(default_factory=list)
    """Evaluation sets (.jsonl, .json, .txt, or folders). Rollouts that contain an n-gram of one
    are left out."""
    against_words: int = Field(default=13, ge=2, le=1000)
    """Length of these n-grams, in words."""
    shard_rows: int = Field(default=50_000, ge=1)
    """Maximum number of rows in a shard (part-00000.jsonl, ...)."""
    tokens: bool = False
    """Include the training rows in unified records and in logs of Inspect."""
    jsonl: bool = False
    """Write unified records and traces as lines of shards instead of one file each."""
    label: str = "auto"
    """Label of traces; auto: solved, partial or failed."""
    embed: str = ""
    """Sentence-transformers model that adds an embedding of its text to each step of traces
    (needs the extra `embeddings`); unset: no embeddings."""
    embed_cache: Path = Path("data/embeddings")
    """Cache folder for embeddings, keyed by text and model."""
    margin: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Minimum reward difference of a pair (dpo)."""
    title: str = ""
    """Title of the export, for readers."""
    tokenizer: str = ""
    """Tokenizer that shows tokens in pages: a folder with tokenizer.json, or a model in the
    cache; unset: by the model's name."""
    push_to_hub: str | None = None
    """Data set on the Hugging Face hub (OWNER/NAME): the folder gets a data card and is pushed
    there, private if the data set is new; HF_TOKEN is sent."""
    dry_run: bool = False
    """With --push_to_hub: write the folder but do not push it."""
    overwrite: bool = False
    """Replace an existing export."""
    skip_bad: bool = False
    """Skip invalid lines and count them."""
    log_level: LogLevel = "warning"
    """Minimum log level."""
    log_format: LogFormat = "auto"
    """Format of log lines; auto: console. json is for log collectors."""


COMMAND = CommandSpec(
    "export",
    SUMMARY,
    ExportSettings,
    usage="SOURCE... --to FORMAT --out PLACE",
    arguments=("source",),
    frequent=(
        *("source", "to", "out", "where", "min_reward", "per_group", "dedupe", "against"),
        *("tokens", "jsonl", "margin", "tokenizer", "push_to_hub", "dry_run", "overwrite"),
        *("skip_bad", "log_level"),
    ),
)
