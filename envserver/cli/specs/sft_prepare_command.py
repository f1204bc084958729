"""The settings of `envserver sft router`, `envserver sft math`, `envserver sft code`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from ...config import SandboxConfig, Section
from ..command_line import CommandSpec

ALIASES = {"output_dir": "out", "gcs_prefix": "upload"}


_ENDS = """The rows are shuffled with the seed and split into OUT/train.jsonl, validation.jsonl
and test.jsonl; OUT/summary.json has the counts, and why rows were dropped."""


class PrepareSettings(Section):
    """Settings that `sft router`, `sft math` and `sft code` share."""

    input: str
    """JSONL, JSON or Parquet file, a folder of them, or a data set on the hub (OWNER/NAME or
    OWNER/NAME:CONFIG). Can be given as the first argument."""
    out: Path
    """Output folder: new, empty, or written by an earlier run, which is replaced."""
    seed: int
    """Shuffle seed."""
    val_ratio: float = Field(default=0.10, ge=0, lt=1)
    """Fraction of the rows used for validation, rounded down."""
    test_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Fraction of the rows used for test, rounded down; 0: no test file."""
    limit: int | None = Field(default=None, ge=1)
    """Maximum number of rows, taken from the start before the shuffle."""
    form: Literal["messages", "prompt"]
    """messages: conversations; prompt: {"prompt", "completion"}."""
    tokenizer: str | None = None
    """Folder or name of a tokenizer that applies its chat template to conversations of the form
    `prompt`; unset: they stay conversations, and the template is applied at training."""
    verify: bool
    """Keep only rows whose completion the environment of the same name scores as correct."""
    processes: int = Field(default=2, ge=1)
    """Number of rows verified in parallel, each in its own process."""
    sandbox: SandboxConfig = SandboxConfig()
    upload: str | None = None
    """Also upload the folder: to a folder, a bucket (gs://bucket/prefix, any fsspec URL), or the
    hub (hf://datasets/OWNER/NAME)."""


class RouterSettings(PrepareSettings):
    """Settings of `sft router`."""

    input: str = "Alovestocode/Router-agent-data"
    out: Path = Path("data/sft-router")
    seed: int = 7
    form: Literal["messages", "prompt"] = "prompt"
    verify: bool = False
    think: Literal["none", "outline"] = "none"
    """outline: start the completion with the row's outline between <think> and </think>."""


class MathSettings(PrepareSettings):
    """Settings of `sft math`."""

    input: str = "XenArcAI/MathX-5M"
    out: Path = Path("data/sft-math")
    seed: int = 7
    test_ratio: float = Field(default=0.0, ge=0, lt=1)
    limit: int | None = Field(default=10_000, ge=1)
    form: Literal["messages", "prompt"] = "prompt"
    verify: bool = True


class CodeSettings(PrepareSettings):
    """Settings of `sft code`."""

    input: str = "OpenCoder-LLM/opc-sft-stage2:educational_instruct"
    out: Path = Path("data/sft-code")
    seed: int = 7
    form: Literal["messages", "prompt"] = "messages"
    verify: bool = False


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
