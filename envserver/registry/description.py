"""Describes an environment class as data, so that a process that cannot import it knows it.

Limits of single settings (`ge=1`) are checked where the class itself is.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final, Literal, Union, cast

import msgspec
from envserver_records.errors import ConfigError
from envserver_records.sandboxes import SandboxSpec
from pydantic import BaseModel, Field, TypeAdapter, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from ..environment import Environment
from ..settings.section import EnvironmentConfig, descriptions
from ..tools.mcp_client import McpServer
from ..tools.typed import TypedTool

_DECLARED: Final = tuple(
    name for name, kind in Environment.__annotations__.items() if kind.startswith("ClassVar")
)
HOOKS: Final = ("on_request", "on_answer")
_PLAIN: Final[dict[str, Any]] = {
    "integer": int,
    "number": float,
    "string": str,
    "boolean": bool,
    "null": type(None),
}


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A field of an environment's Config. `schema`: its JSON schema; None: any value. `default`:
    JSON-like."""

    name: str
    schema: dict[str, Any] | None = None
    default: Any = None
    required: bool = False
    description: str = ""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """An environment class as data.

    Args:
        name: of the entry point.
        title: its `name`.
        summary: its docstring.
        declared: class attributes by name.
        needs_server: its hooks; "services", if it has services, tools on the server or shared MCP
            servers.
        settings: the fields of its Config that differ from `EnvironmentConfig`.
        file: that defines it.
    """

    name: str
    title: str
    summary: str
    declared: dict[str, Any]
    scores_groups: bool
    needs_server: list[str]
    settings: list[Setting]
    file: str
    sandbox: SandboxSpec | None = None


def describe(name: str, kind: type[Environment]) -> Description:
    return Description(
        name=name,
        title=kind.name,
        summary=inspect.getdoc(kind) or "",
        declared={each: msgspec.to_builtins(getattr(kind, each)) for each in _DECLARED},
        scores_groups=_overrides(kind, "score_group"),
        needs_server=[
            *(each for each in HOOKS if _overrides(kind, each)),
            *(["services"] if _has_services(kind) else []),
        ],
        settings=_settings_of(kind.Config),
        file=inspect.getfile(kind),
        sandbox=kind.sandbox,
    )


def _overrides(kind: type[Environment], method: str) -> bool:
    return getattr(kind, method, None) is not getattr(Environment, method, None)


def _has_services(kind: type[Environment]) -> bool:
    held = [value for base in kind.__mro__ for value in vars(base).values()]
    listed = kind.tools if isinstance(kind.tools, list | tuple) else ()
    return _overrides(kind, "services") or any(
        (isinstance(value, TypedTool) and value.on_server)
        or (isinstance(value, McpServer) and value.shared)
        for value in (*held, *listed)
    )


def _settings_of(config: type[BaseModel]) -> list[Setting]:
    settings, texts = [], descriptions(config)
    for name, field in config.model_fields.items():
        base = EnvironmentConfig.model_fields.get(name)
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if base is not None and base.get_default(call_default_factory=True) == default:
            continue
        try:
            schema = TypeAdapter(cast(Any, field.annotation)).json_schema()
        except (PydanticUserError, PydanticSchemaGenerationError):
            schema = None
        try:
            plain = to_jsonable_python(default)
        except PydanticSerializationError as error:
            raise ConfigError(
                f"The default of the setting {name!r} is not JSON: {error}."
            ) from error
        settings.append(
            Setting(
                name=name,
                schema=schema,
                default=plain,
                required=field.is_required(),
                description=texts.get(name, ""),
            )
        )
    return settings


def config_class(described: Description) -> type[EnvironmentConfig]:
    """Returns a Config with the same names, types and defaults."""
    fields: dict[str, Any] = {}
    texts = descriptions(EnvironmentConfig)
    for setting in described.settings:
        base = EnvironmentConfig.model_fields.get(setting.name)
        kind = base.annotation if base is not None else annotation_of(setting.schema)
        default = ... if setting.required else setting.default
        text = setting.description or texts.get(setting.name, "")
        fields[setting.name] = (kind, Field(default, description=text, validate_default=True))
    return create_model("Config", __base__=EnvironmentConfig, **fields)


def annotation_of(schema: Mapping[str, Any] | None) -> Any:
    if schema is None:
        return Any
    return _annotation(schema, schema.get("$defs", {}))


def _annotation(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Any:
    if "$ref" in schema:
        return _annotation(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "enum" in schema:
        return Literal[tuple(schema["enum"])]
    if "const" in schema:
        return Literal[schema["const"]]
    if "anyOf" in schema:
        return Union[tuple(_annotation(part, definitions) for part in schema["anyOf"])]  # noqa: UP007
    kind = schema.get("type")
    if kind == "array":
        return list[_annotation(schema.get("items") or {}, definitions)]  # type: ignore[misc]
    if kind == "object":
        values = schema.get("additionalProperties")
        held = _annotation(values, definitions) if isinstance(values, dict) else Any
        return dict[str, held]  # type: ignore[valid-type]
    return _PLAIN.get(kind or "", Any)
