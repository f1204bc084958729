"""Settings, as flags or in a YAML file (`--config`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

ADAPTER_SIZES: Final = {
    1: "ONE",
    2: "TWO",
    4: "FOUR",
    8: "EIGHT",
    16: "SIXTEEN",
    32: "THIRTY_TWO",
}
_LABEL: Final = re.compile(r"[a-z0-9_-]{1,63}")


class VertexSettings(BaseModel):
    """Tunes a model with Vertex AI: prepares and uploads data, launches a job, watches it, fetches
    the adapter.

    The same command continues where an earlier one ended; Ctrl-C leaves the job running.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    data: Path
    """A file of rows or a folder, as for `envserver_clients.sft`; a folder's val.jsonl is used."""
    output: Path
    """Folder of this training: prepared data, state.json, result.json, the adapter."""
    bucket: str
    """Where to upload the data: gs://bucket/prefix, or any other URL that fsspec supports."""
    project: str
    """Google Cloud project."""
    location: str = "us-central1"
    """Region of the job; the bucket should be in it, too."""
    base_model: str = "meta/llama3_1@llama-3.1-8b-instruct"
    """A Gemini model (gemini-2.5-flash), or an open one (publisher/model@version)."""
    custom_base: str = ""
    """gs:// folder with initial weights for an open model. Default: its own weights."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Approximate maximum tokens of an example. Default: 131072 (Gemini), 8192 (open models)."""
    tool: str = ""
    """Use only this tool's rows in a folder of `envserver sft build`."""
    form: Literal["auto", "contents", "messages"] = "auto"
    """Form of the lines: contents (Gemini), messages (open models); auto: by the base model."""
    validation: Path | None = None
    """File of validation rows. Default: the folder's own, or `validation_share`."""
    validation_share: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the rows for validation if there are no validation rows."""
    seed: int = 0
    """Seed of that choice."""

    adapter_size: int = 16
    """Rank of the adapter: 1, 2, 4, 8, 16 or 32."""
    epochs: int = Field(default=3, ge=1)
    """Passes over the data."""
    learning_rate_multiplier: float | None = Field(default=None, gt=0)
    """Factor of the service's learning rate. Default: 1."""
    tuning_mode: Literal["adapter", "full"] = "adapter"
    """What to train of an open model: a LoRA adapter, or all weights."""
    display_name: str = "envserver"
    """Display name of the tuned model."""
    label: str = "envserver"
    """Value of the job's label `made_by`."""

    until: Literal["prepare", "upload", "launch", "done"] = "done"
    """Stop after this step; the same command without it continues."""
    dry_run: bool = False
    """Prepare the data and print the requests; sends nothing and needs no credentials."""
    poll_seconds: float = Field(default=30.0, gt=0)
    """Seconds between two looks at the job."""
    patience_minutes: float = Field(default=60.0, gt=0)
    """Stop watching after this time without an answer; the job continues."""
    endpoint: str = ""
    """Address of the API. Default: https://LOCATION-aiplatform.googleapis.com."""
    keep_uri: str = ""
    """Where to put an open model's adapter. Default: `tuned` beside the data."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.adapter_size not in ADAPTER_SIZES:
            raise ValueError(f"adapter_size must be one of {', '.join(map(str, ADAPTER_SIZES))}")
        if not _LABEL.fullmatch(self.label):
            raise ValueError("label may have only lower-case letters, digits, _ and -, at most 63")
        if len(self.display_name) > 128:
            raise ValueError("display_name may have at most 128 characters")
        if not self.is_open and (self.custom_base or self.tuning_mode == "full"):
            raise ValueError("custom_base and tuning_mode full are only for open models")
        if "://" not in self.bucket:
            raise ValueError("bucket must be a URL, such as gs://bucket/prefix")
        return self

    @property
    def is_open(self) -> bool:
        """Whether the base model's weights are public: publisher/model@version."""
        return "/" in self.base_model

    @property
    def address(self) -> str:
        return self.endpoint or f"https://{self.location}-aiplatform.googleapis.com"

    @property
    def version(self) -> str:
        """Version of the API: v1beta1 for features of open models."""
        return "v1beta1" if self.is_open else "v1"

    @property
    def most_tokens(self) -> int:
        return self.max_tokens or (8_192 if self.is_open else 131_072)

    @property
    def lines(self) -> Literal["contents", "messages"]:
        if self.form == "auto":
            return "messages" if self.is_open else "contents"
        return self.form
