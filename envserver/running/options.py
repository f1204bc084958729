"""The tree of settings as a flat table: dotted path -> Option.
Where users name the sections (`dict[str, Section]`), `*` stands for the name, until `expanded`
inserts the names that were used.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import orjson
from envserver_records.errors import ConfigError
from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from ..settings.config import EngineConfig
from ..settings.section import EnvironmentConfig, Section, descriptions

_LISTS = (list, tuple, set, frozenset)
ANY_NAME = "*"
"""Stands for any name in a path."""
_PLAIN = {int: "int", float: "float", str: "text", bool: "true|false", Path: "path", dict: "JSON"}


@dataclass(frozen=True)
class Option:
    path: str
    annotation: Any
    default: Any
    model: type[BaseModel]
    secret: bool

    @property
    def description(self) -> str:
        return descriptions(self.model).get(self.path.rpartition(".")[2], "")

    @property
    def group(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def is_bool(self) -> bool:
        return bool in _members(self.annotation)

    @property
    def is_switch(self) -> bool:
        """Whether the option is boolean, so that its flag needs no value."""
        return set(_members(self.annotation)) <= {bool, type(None)}

    @property
    def is_list(self) -> bool:
        return any(_origin(member) in _LISTS for member in _members(self.annotation))

    @property
    def allows_none(self) -> bool:
        return type(None) in _members(self.annotation) or self.annotation is Any

    @property
    def type_name(self) -> str:
        names = [_type_name(member) for member in _members(self.annotation)]
        return "|".join(dict.fromkeys(names))

    @property
    def choices(self) -> list[str]:
        members = _members(self.annotation)
        named = [v for m in members if _origin(m) is typing.Literal for v in typing.get_args(m)]
        return [str(value) for value in named] or (["true", "false"] if self.is_bool else [])

    @property
    def first_sentence(self) -> str:
        text = " ".join(self.description.split())
        return f"{text.partition('. ')[0].rstrip('.')}." if text else ""

    @property
    def default_text(self) -> str:
        if self.default is ...:
            return "needed"
        if self.secret or self.default is None or self.default == "":
            return "unset"
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if isinstance(self.default, (list, tuple, set, frozenset)):
            return ",".join(map(str, self.default)) or "none"
        return str(self.default)


@functools.lru_cache(maxsize=32)
def options_of(model: type[BaseModel]) -> dict[str, Option]:
    """Returns every leaf of `model` by dotted path; not to be changed, for it is cached."""
    set_before = preset(model)
    options = expanded(_leaves(model, ""), set_before)
    for path, value in set_before.items():
        options[path] = replace(options[path], default=value)
    return options


def expanded(options: Mapping[str, Option], names: Iterable[str]) -> dict[str, Option]:
    used = list(names)
    more: dict[str, Option] = {}
    for path, option in options.items():
        section, star, rest = path.partition(f".{ANY_NAME}.")
        for named in used if star else ():
            if named.startswith(f"{section}."):
                name = named[len(section) + 1 :].partition(".")[0]
                own = f"{section}.{name}.{rest}"
                more.setdefault(own, replace(option, path=own))
    return {**options, **{path: one for path, one in more.items() if path not in options}}


def named_sections(options: Iterable[str]) -> set[str]:
    """Returns the paths below which users name sections: `env.agents`."""
    return {path.partition(f".{ANY_NAME}.")[0] for path in options if f".{ANY_NAME}." in path}


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo, type[BaseModel] | None, str]]:
    """Yields name and field, the section that it is, if any, and `.*` if users name several."""
    for name, field in model.model_fields.items():
        if (named := _named_section(field.annotation)) is not None:
            yield name, field, named, f".{ANY_NAME}"
        elif is_section(field.annotation):
            yield name, field, typing.cast(type[BaseModel], field.annotation), ""
        else:
            yield name, field, None, ""


def _leaves(model: type[BaseModel], prefix: str) -> dict[str, Option]:
    found: dict[str, Option] = {}
    for name, field, section, star in _fields(model):
        path = f"{prefix}{name}"
        if section is not None:
            found |= _leaves(section, f"{path}{star}.")
        else:
            found[path] = Option(
                path=path,
                annotation=field.annotation,
                default=_default(field),
                model=model,
                secret=_is_secret(field.annotation),
            )
    return found


def _named_section(annotation: Any) -> type[BaseModel] | None:
    """Returns the section class of a `dict[str, Section]`; None for any other type."""
    arguments = typing.get_args(annotation)
    is_one = typing.get_origin(annotation) is dict and is_section(arguments[1])
    return typing.cast(type[BaseModel], arguments[1]) if is_one else None


def is_section(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, BaseModel)


def sections_of(model: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Returns the first line of each section's docstring, by dotted path."""
    found: dict[str, str] = {}
    for name, _, section, star in _fields(model):
        if section is not None:
            path = f"{prefix}{name}{star}"
            found[path] = inspect.cleandoc(section.__doc__ or "").partition("\n")[0]
            found |= sections_of(section, f"{path}.")
    return found


def preset(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Returns the values in `model`'s default sections that differ from their classes' defaults."""
    found: dict[str, Any] = {}
    for name, field, section, star in _fields(model):
        default = _default(field)
        if star:
            for own, one in default.items():
                found |= _set_in(one, f"{prefix}{name}.{own}.")
        elif isinstance(default, BaseModel):
            found |= _set_in(default, f"{prefix}{name}.")
        elif section is not None:
            found |= preset(section, f"{prefix}{name}.")
    return found


def _set_in(section: BaseModel, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            found |= _set_in(value, f"{prefix}{name}.")
        elif isinstance(value, dict) and any(isinstance(v, BaseModel) for v in value.values()):
            for own, one in value.items():
                found |= _set_in(one, f"{prefix}{name}.{own}.")
        elif name in section.model_fields_set:
            found[f"{prefix}{name}"] = value
    return found


def flatten(
    tree: Mapping[str, Any], options: Mapping[str, Option], prefix: str = ""
) -> dict[str, Any]:
    """Returns nested dicts as dotted paths; the value at an option's path is kept, dict or not."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and path not in options:
            flat |= flatten(value, options, f"{path}.")
        else:
            flat[path] = value
    return flat


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, name = path.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return tree


def parse(option: Option, text: str) -> Any:
    """Converts the text of a flag or variable to a value that pydantic can check.

    "none" is None if the type allows it; lists may be JSON or comma-separated; dicts are JSON.
    """
    if text.lower() in ("none", "null") and option.allows_none:
        return None
    members = [member for member in _members(option.annotation) if member is not type(None)]
    if option.is_list and text.lstrip().startswith("["):
        return _json(text)
    if option.is_list and str not in members:
        return [part.strip() for part in text.split(",") if part.strip()]
    if any(_needs_json(member) for member in members):
        return _json(text)
    for value in (v for m in members if _origin(m) is typing.Literal for v in typing.get_args(m)):
        if not isinstance(value, str) and str(value).lower() == text.lower():
            return value
    return text


def nearest(path: str, known: Iterable[str]) -> str | None:
    paths = list(known)
    if near := difflib.get_close_matches(path, paths, n=1, cutoff=0.75):
        return near[0]
    names: dict[str, str] = {}
    for candidate in paths:
        names.setdefault(candidate.rpartition(".")[2], candidate)
    by_name = difflib.get_close_matches(path.rpartition(".")[2], names, n=1, cutoff=0.75)
    if by_name:
        return names[by_name[0]]
    near = difflib.get_close_matches(path, paths, n=1, cutoff=0.6)
    return near[0] if near else None


def _json(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"must be JSON: {error.msg} at character {error.pos + 1}") from None


def _needs_json(annotation: Any) -> bool:
    origin = _origin(annotation)
    return origin in (dict, typing.Any) or is_section(annotation)


def _is_secret(annotation: Any) -> bool:
    if annotation in (SecretStr, SecretBytes):
        return True
    return any(_is_secret(argument) for argument in typing.get_args(annotation))


def _default(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True, validated_data={})
    return ... if value is PydanticUndefined else value


def _members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(m for arg in typing.get_args(annotation) for m in _members(arg))
    return (annotation,)


def _origin(annotation: Any) -> Any:
    return typing.get_origin(annotation) or annotation


def _type_name(annotation: Any) -> str:
    origin = _origin(annotation)
    if annotation is type(None):
        return "none"
    if origin is typing.Literal:
        return "|".join(map(str, typing.get_args(annotation)))
    if origin in _LISTS:
        inner = [_type_name(item) for item in typing.get_args(annotation) if item is not ...]
        return f"list of {inner[0] if inner else 'text'}"
    if _is_secret(annotation):
        return "secret"
    name = getattr(origin, "__name__", str(origin))
    return _PLAIN.get(origin, name.lower())


S = TypeVar("S", bound=Section)

_LONGEST_VALUE_SHOWN = 80


def with_environment(
    settings_class: type[S], reference: str, config_class: type[EnvironmentConfig] | None = None
) -> type[S]:
    if config_class is None:
        from ..registry import find

        config_class = find(reference).Config
    fields: dict[str, Any] = {"env": (config_class, ...)}
    return create_model(settings_class.__name__, __base__=settings_class, **fields)


_OF_DISTRIBUTION = ("sampling.temperature", "sampling.top_p")


def sampling_of_model(
    model: type[BaseModel], values: Mapping[str, Any], options: Mapping[str, Option]
) -> dict[str, Any]:
    """Returns the sampling settings of the named model, to be used where nothing else is set.
    Settings `model` for training leave out those that change the distribution: they are someone's
    taste in answers, and trainers learn from the model's own distribution.
    """
    name = values.get("model")
    if not isinstance(name, str) or name == "sim" or "engine.models_file" not in options:
        return {}
    from ..models.catalogue import find_model, read_catalogue

    place = Path(values.get("engine.models_file", EngineConfig().models_file))
    chosen = flatten({"sampling": find_model(name, read_catalogue(place), place).sampling}, options)
    left_out = _OF_DISTRIBUTION if getattr(model, "for_training", False) else ()
    return {
        path: value for path, value in chosen.items() if path in options and path not in left_out
    }


def config_error(problems: Iterable[str]) -> ConfigError:
    """Returns the error with all problems, each once. Raise it `from None` where pydantic's error,
    which holds the values, would be its context."""
    listed = list(dict.fromkeys(problems))
    return ConfigError("\n".join(listed), problems=listed)


def faults(error: ValidationError) -> list[tuple[tuple[int | str, ...], str]]:
    """Returns the place and the message of each fault, without the values."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return [(one["loc"], one["msg"]) for one in found]


def validated(
    model: type[S],
    given: Mapping[str, Any],
    options: Mapping[str, Option],
    where: Callable[[str], str],
    defaults: Mapping[str, Any] | None = None,
) -> S:
    """Makes `model` of what is `given` over the tree `defaults`; reports all problems at once."""
    values = preset(model) | flatten(defaults or {}, options)
    values |= sampling_of_model(model, {**values, **given}, options) | dict(given)
    tree = nest(values)
    for name, field in model.model_fields.items():
        if field.is_required() and is_section(field.annotation):
            tree.setdefault(name, {})
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        raise config_error(_explained(one, values, options, where) for one in found) from None


def _explained(
    error: ErrorDetails,
    values: Mapping[str, Any],
    options: Mapping[str, Option],
    where: Callable[[str], str],
) -> str:
    path = _path_of(error["loc"], options)
    option = options.get(path)
    if error["type"] == "missing":
        about = f" ({option.description.rstrip('.')})" if option and option.description else ""
        return f"{where(path)} is needed{about}."
    message = re.sub(r"^Value error, ", "", error["msg"])
    message = re.sub(r"^Input should be ", "must be ", message)
    message = re.sub(r", unable to parse string as .*$", "", message.rstrip("."))
    shown = _shown(values[path]) if path in values and option and not option.secret else ""
    return f"{where(path)}: {message}{shown}."


def _path_of(location: Sequence[int | str], options: Mapping[str, Option]) -> str:
    parts: list[str] = []
    for part in location:
        parts.append(str(part))
        if ".".join(parts) in options:
            break
    return ".".join(parts)


def _shown(value: Any) -> str:
    text = re.sub(r"//[^/@\s]*@", "//***@", str(value))
    return f" (given: {text[:_LONGEST_VALUE_SHOWN]})"
