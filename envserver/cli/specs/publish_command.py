"""The settings of `envserver publish`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from ...config import Section
from ..command_line import CommandSpec

SUMMARY = """Publishes a model or a LoRA adapter to the Hugging Face hub in one commit, with its
card: weights as safetensors, config, tokenizer, chat template, card, recipe, metrics. Never
optimizer states, checkpoints, subfolders or other files; a file that seems to contain a secret ends
the command. A missing repository is created as private. The token is the one of `hf auth login`,
or HF_TOKEN."""


class PublishSettings(Section):
    """Settings of `publish`."""

    folder: Path
    """Folder of the model or adapter. Can be given as the first argument."""
    repository: str
    """Name on the hub, OWNER/NAME. Can be given as the second argument."""
    evaluation: list[Path] = Field(default=[])
    """Folders of `evaluate` whose results are written into the card (model-index and a table)."""
    public: bool = False
    """Create a public repository, or publish to one."""
    dry_run: bool = False
    """Show the files and the card exactly as they would be uploaded; ask the hub nothing."""
    base_model: str | None = None
    """Hub id of the base model, for the card and the adapter's config."""
    license: str | None = None
    """License, for the card."""


COMMAND = CommandSpec(
    "publish",
    SUMMARY,
    PublishSettings,
    usage="FOLDER OWNER/NAME",
    arguments=("folder", "repository"),
)
