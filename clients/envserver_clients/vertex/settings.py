"""What may be set, as flags or in a YAML file (`--config`)."""

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


class Settings(BaseModel):
    """Supervised tuning by Vertex AI: data prepared and uploaded, a job launched, watched, fetched.

    The same command goes on where an earlier one ended; Ctrl-C leaves the job running.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    data: Path
    """A file of rows or a folder, as for `envserver_clients.sft`; of a folder with val.jsonl that
    is used.
    """
    output: Path
    """Folder of this training: prepared data, state.json, result.json, the adapter."""
    bucket: str
    """Where the data goes: gs://bucket/prefix, or any other URL that fsspec knows."""
    project: str
    """Google Cloud project."""
    location: str = "us-central1"
    """Region of the job; the bucket should be there, too."""
    base_model: str = "meta/llama3_1@llama-3.1-8b-instruct"
    """A Gemini model (gemini-2.5-flash), or an open one (publisher/model@version)."""
    custom_base: str = ""
    """Of an open model: gs:// folder of weights to begin with in place of its own."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest example, about; unset: 131072 for Gemini, 8192 for open models."""
    tool: str = ""
    """Only this tool's rows, of a folder of `envserver sft build`."""
    form: Literal["auto", "contents", "messages"] = "auto"
    """Of the lines: contents (Gemini), messages (open models); auto: by the base model."""
    validation: Path | None = None
    """File of rows to validate with; unset: the folder's own, or `validation_share`."""
    validation_share: float = Field(default=0.0, ge=0, lt=1)
    """Part of the rows that is set aside where there are none to validate with."""
    seed: int = 0
    """Of which rows that are."""

    adapter_size: int = 16
    """Rank of the adapter: 1, 2, 4, 8, 16 or 32."""
    epochs: int = Field(default=3, ge=1)
    """Passes over the data."""
    learning_rate_multiplier: float | None = Field(default=None, gt=0)
    """Of the service's own rate; unset: 1."""
    tuning_mode: Literal["adapter", "full"] = "adapter"
    """Of an open model: a LoRA adapter, or all weights."""
    display_name: str = "envserver"
    """Of the tuned model there."""
    label: str = "envserver"
    """Value of the job's label `made_by`."""

    until: Literal["prepare", "upload", "launch", "done"] = "done"
    """Stop after this step; the same command without it goes on."""
    dry_run: bool = False
    """Prepare the data and print the requests; nothing is sent, no credentials are needed."""
    poll_seconds: float = Field(default=30.0, gt=0)
    """From one look at the job to the next."""
    patience_minutes: float = Field(default=60.0, gt=0)
    """Stop watching when the service did not answer for so long; the job is not touched."""
    endpoint: str = ""
    """Address of the API; unset: https://LOCATION-aiplatform.googleapis.com."""
    keep_uri: str = ""
    """Where an open model's adapter is put; unset: beside the data, in `tuned`."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.adapter_size not in ADAPTER_SIZES:
            raise ValueError(f"adapter_size is one of {', '.join(map(str, ADAPTER_SIZES))}")
        if not _LABEL.fullmatch(self.label):
            raise ValueError("label has only lower-case letters, digits, _ and -, 63 at most")
        if len(self.display_name) > 128:
            raise ValueError("display_name has 128 characters at most")
        if not self.is_open and (self.custom_base or self.tuning_mode == "full"):
            raise ValueError("custom_base and tuning_mode full are for open models")
        if "://" not in self.bucket:
            raise ValueError("bucket is a URL, such as gs://bucket/prefix")
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
        """Of the API: what only open models have is in v1beta1."""
        return "v1beta1" if self.is_open else "v1"

    @property
    def most_tokens(self) -> int:
        return self.max_tokens or (8_192 if self.is_open else 131_072)

    @property
    def lines(self) -> Literal["contents", "messages"]:
        if self.form == "auto":
            return "messages" if self.is_open else "contents"
        return self.form
