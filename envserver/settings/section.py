"""Base classes of settings, and the settings of an environment, which workers import, too.

Docstrings below fields are their help. They are read when they are shown: pydantic's
`use_attribute_docstrings` finds them too, but reads the source of every class while it is imported,
which took a tenth of a server's start.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from envserver_records.tasks import CompactionRewards, Split
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SecretStr,
    field_validator,
)
from pydantic_core import CoreSchema

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Amount = Annotated[float, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
FiniteAmount = Annotated[Amount, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Described(BaseModel):
    """Base of models whose fields have docstrings: they are the descriptions in JSON schemas."""

    model_config = ConfigDict(defer_build=True)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in descriptions(cls).items():
            if name in properties:
                properties[name].setdefault("description", text)
        return schema


class Section(Described):
    """Base class of all settings: unknown names are errors, docstrings are help texts."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, populate_by_name=True, protected_namespaces=()
    )


@functools.cache
def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Not to be changed, for it is cached."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        found |= _of_module(base.__module__).get(base.__qualname__, {})
    own = {name: field.description for name, field in model.model_fields.items()}
    return {name: text for name in own if (text := own[name] or found.get(name))}


def describe_fields(model: type[BaseModel]) -> None:
    """Writes the descriptions into the fields, where FastAPI reads those of parameters."""
    for name, text in descriptions(model).items():
        model.model_fields[name].description = text


@functools.cache
def _of_module(name: str) -> dict[str, dict[str, str]]:
    """The docstrings below the fields of each class; none if there is no source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (KeyError, OSError, TypeError):
        return {}
    return dict(_of_classes(tree, ""))


def _of_classes(tree: ast.AST, prefix: str) -> Iterator[tuple[str, dict[str, str]]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield f"{prefix}{node.name}", dict(_below_fields(node))
            yield from _of_classes(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _of_classes(node, f"{prefix}{node.name}.<locals>.")


def _below_fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in zip(node.body, node.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str() as text)),
            ):
                yield name, inspect.cleandoc(text)


def _of_one_line(key: SecretStr) -> SecretStr:
    """Returns the key without blanks around it, which a file's last line break is."""
    text = key.get_secret_value().strip()
    if not text.isprintable():
        raise ValueError("a key must be one line without control characters")
    return SecretStr(text)


ApiKey = Annotated[SecretStr, AfterValidator(_of_one_line)]


class AgentConfig(Section):
    """Settings of one agent (`--env.agents.NAME.*`); unset fields follow the run's settings."""

    model_name: str | None = None
    """Model name, on the run's engine or at `base_url`; "default": the first one listed."""
    base_url: str | None = None
    """Address of the agent's own engine, an OpenAI-compatible server."""
    api_key: ApiKey = SecretStr("")
    """API key of the agent's own engine; never logged, written or sent to a worker."""
    server_type: Literal["vllm", "openai"] = "vllm"
    """Type of the agent's own engine. vllm: returns token ids and logprobs; openai: text only."""
    timeout: Positive = 1200.0
    """Timeout in seconds of one call to the agent's own engine."""
    temperature: Amount | None = None
    """Sampling temperature."""
    top_p: PositiveShare | None = None
    """Nucleus sampling; 1: off."""
    max_tokens: Count | None = None
    """Maximum length of one answer, in tokens."""
    trained: bool | None = None
    """Whether the agent's tokens are trained; unset: the environment decides."""

    @field_validator("base_url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            value = value.strip().rstrip("/")
            check_url(value)
        return value


class EnvironmentConfig(Section):
    """Base class of an environment's `Config`; its fields are `--env.*`."""

    group_size: Count = 4
    """Rollouts per group: attempts at one task whose rewards are compared."""
    total_steps: Count | None = None
    """Groups to make, of a mix in total; unset: each task once in `process`, endless in `serve`."""
    split: Split = "train"
    """Split of the tasks: train, validation or test."""
    seed: int = 0
    """Seed for choosing and ordering tasks."""
    data_path_to_save_groups: Path | None = None
    """JSONL file that groups are written to; unset: data/<environment>.jsonl."""
    include_messages: bool = True
    """Write the conversations next to the tokens."""
    include_actions: bool = False
    """Write the agents' recorded actions next to the tokens."""
    include_experts: bool = False
    """Write the routed experts of each row next to the tokens, if `tokens.experts` records them."""
    ensure_scores_are_not_same: bool | None = None
    """Drop groups whose rewards are all equal; unset: yes in `serve`, no in `process`."""
    max_token_length: Count = 8192
    """Maximum length of a training sequence, in tokens; `rollouts.too_long` says what happens
    there. Groups with a longer one are dropped."""
    max_turns: Count = 8
    """Maximum model calls per rollout (per agent, in a multi-agent rollout)."""
    max_completion_tokens: Count | None = None
    """Maximum tokens sampled per rollout, over all trained calls; unset: no limit."""
    worker_timeout: Positive = 240.0
    """Time limit of a rollout in seconds of wall time, from start to result."""
    score_range: Literal["unit", "pm1"] = "unit"
    """Reward range in Atropos groups: [0, 1] (unit) or mapped to [-1, 1] (pm1)."""
    compaction_rewards: CompactionRewards = "same"
    """Rows of an agent that summarised its history: each has the whole reward (same), only the last
    is trained (last), or they share the advantage by their trained tokens (length)."""
    agents: dict[str, AgentConfig] = {}
    """Model, engine and sampling of single agents in a multi-agent rollout."""


def check_url(url: str, example: str = "http://host:port/v1") -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"an address must look like {example}")
    try:
        _ = parts.port
    except ValueError as error:
        raise ValueError("the port must be a number from 0 to 65535") from error
    if parts.query or parts.fragment:
        raise ValueError("an address must not have a query or a fragment")
