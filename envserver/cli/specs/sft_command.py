"""The settings of `envserver sft-gen`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from ...config import Settings
from ..command_line import FREQUENT, CommandSpec

SUMMARY = """Runs rollouts of one environment and writes those with the best scores of each group as
rows for supervised training: {"messages", "score"}, or {"prefix", "completion", "score"}."""


class SftSettings(Settings):
    """Settings with the flags that only `sft-gen` has."""

    filepath: Path = Path("sft_data.jsonl")
    """JSONL file for the rows; may also stand first, without its name."""
    tokenizer: str | None = None
    """Folder or name of the model's tokenizer; only needed without --save-messages."""
    save_messages: bool = False
    """Save conversations instead of the text of the tokens."""
    save_top_n_per_group: int = Field(default=3, ge=1)
    """The most rows of one group."""
    num_seqs_to_save: int = Field(default=100, ge=1)
    """Rows before stopping."""
    allow_negative_scores: bool = False
    """Keep rows with a score of 0 or less, too."""
    minimum_score_diff_max_min: float = Field(default=0.0, ge=0)
    """A row's score must be so much above the least of its group."""
    append_to_previous: bool = False
    """Go on with a file that exists."""


ALIASES = {"group_size": "env.group_size", "max_token_len": "env.max_token_length"}


COMMAND = CommandSpec(
    "sft-gen",
    SUMMARY,
    SftSettings,
    usage="FILE --env NAME",
    arguments=("filepath",),
    aliases=ALIASES,
    frequent=(*FREQUENT, "filepath", "tokenizer", "save_messages", "num_seqs_to_save"),
)
