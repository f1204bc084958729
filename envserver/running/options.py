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
from itertools import accumulate
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
    """A setting.

    Args:
        model: the section that has it.
        is_preset: whether `default` comes from the default of its section, not from its own field.
    """

    path: str
    annotation: Any
    default: Any
    model: type[BaseModel]
    is_preset: bool = False

    @property
    def description(self) -> str:
        return descriptions(self.model).get(self.path.rpartition(".")[2], "")

    @property
    def group(self) -> str:
        return self.path.rpartition(".")[0]

    @functools.cached_property
    def members(self) -> tuple[Any, ...]:
        return _members(self.annotation)

    @property
    def secret(self) -> bool:
        return _is_secret(self.annotation)

    @property
    def is_bool(self) -> bool:
        return bool in self.members

    @property
    def is_switch(self) -> bool:
        """Whether the option is boolean, so that its flag needs no value."""
        return set(self.members) <= {bool, type(None)}

    @property
    def is_list(self) -> bool:
        return any(_origin(member) in _LISTS for member in self.members)

    @property
    def allows_none(self) -> bool:
        return type(None) in self.members or self.annotation is Any

    @property
    def type_name(self) -> str:
        return "|".join(dict.fromkeys(map(_type_name, self.members)))

    @property
    def literals(self) -> list[Any]:
        literals = (member for member in self.members if _origin(member) is typing.Literal)
        return [value for literal in literals for value in typing.get_args(literal)]

    @property
    def choices(self) -> list[str]:
        return [*map(str, self.literals)] or (["true", "false"] if self.is_bool else [])

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
        if isinstance(self.default, _LISTS):
            return ",".join(map(str, self.default)) or "none"
        return str(self.default)

    def parse(self, text: str) -> Any:
        """Converts the text of a flag or variable to a value that pydantic can check.

        "none" is None if the type allows it; lists may be JSON or comma-separated; dicts are JSON.
        """
        if text.lower() in ("none", "null") and self.allows_none:
            return None
        if self.is_list and text.lstrip().startswith("["):
            return _json(text)
        if self.is_list and str not in self.members:
            return [part.strip() for part in text.split(",") if part.strip()]
        if any(
            _origin(member) in (dict, Any) or is_section(_origin(member)) for member in self.members
        ):
            return _json(text)
        for value in self.literals:
            if not isinstance(value, str) and str(value).lower() == text.lower():
                return value
        return text


@functools.lru_cache(maxsize=32)
def options_of(model: type[BaseModel]) -> dict[str, Option]:
    """Returns every leaf of `model` by dotted path; not to be changed, for it is cached."""
    return {option.path: option for option in _leaves(model, "", None)}


def _leaves(model: type[BaseModel], prefix: str, default: BaseModel | None) -> Iterator[Option]:
    """`default`: the section as it is by default; unset fields are as its class says."""
    for name, field in model.model_fields.items():
        path, annotation = f"{prefix}{name}", field.annotation
        is_preset = default is not None and name in default.model_fields_set
        value = getattr(default, name) if is_preset else _default(field)
        if (named := _named_section(annotation)) is not None:
            yield from _leaves(named, f"{path}.{ANY_NAME}.", None)
            for key, section in value.items():
                yield from _leaves(named, f"{path}.{key}.", section)
        elif is_section(annotation):
            section = value if isinstance(value, BaseModel) else None
            yield from _leaves(typing.cast(type[BaseModel], annotation), f"{path}.", section)
        else:
            yield Option(path, annotation, value, model, is_preset)


def expanded(options: Mapping[str, Option], names: Iterable[str]) -> dict[str, Option]:
    used = list(names)
    more: dict[str, Option] = {}
    for path, option in options.items():
        section, star, rest = path.partition(f".{ANY_NAME}.")
        for named in used if star else ():
            if named.startswith(f"{section}."):
                name = named[len(section) + 1 :].partition(".")[0]
                own = f"{section}.{name}.{rest}"
                more[own] = replace(option, path=own)
    return {**options, **more, **options}


def _named_section(annotation: Any) -> type[BaseModel] | None:
    """Returns the section class of a `dict[str, Section]`; None for any other type."""
    arguments = typing.get_args(annotation)
    is_one = typing.get_origin(annotation) is dict and is_section(arguments[1])
    return typing.cast(type[BaseModel], arguments[1]) if is_one else None


def is_section(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, BaseModel)


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


def nearest(path: str, known: Iterable[str]) -> str | None:
    """Returns the most similar path, or the path with the most similar last name."""
    paths = list(known)
    names: dict[str, str] = {}
    for candidate in paths:
        names.setdefault(candidate.rpartition(".")[2], candidate)
    by_name = difflib.get_close_matches(path.rpartition(".")[2], names, 1, 0.75)
    near = (
        difflib.get_close_matches(path, paths, 1, 0.75)
        or [names[name] for name in by_name]
        or difflib.get_close_matches(path, paths, 1, 0.6)
    )
    return near[0] if near else None


def _json(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"must be JSON: {error.msg} at character {error.pos + 1}") from None


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
    return _PLAIN.get(origin, getattr(origin, "__name__", str(origin)).lower())


S = TypeVar("S", bound=Section)

_LONGEST_VALUE_SHOWN = 80


def with_environment(settings_class: type[S], config_class: type[EnvironmentConfig]) -> type[S]:
    fields: dict[str, Any] = {"env": (config_class, ...)}
    return create_model(settings_class.__name__, __base__=settings_class, **fields)


_OF_DISTRIBUTION = ("sampling.temperature", "sampling.top_p")


def sampling_of_model(
    model: type[BaseModel], values: Mapping[str, Any], options: Mapping[str, Option]
) -> dict[str, Any]:
    """Returns the sampling settings of the named model, to be used where nothing else is set.
    Settings `model` for training leave out those that change the distribution: they are someone's
    taste in answers, and trainers learn from the model's own distribution."""
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
    return [(error["loc"], error["msg"]) for error in found]


def validated(
    model: type[S],
    given: Mapping[str, Any],
    options: Mapping[str, Option],
    where: Callable[[str], str],
    defaults: Mapping[str, Any] | None = None,
) -> S:
    """Makes `model` of what is `given` over the tree `defaults`; reports all problems at once."""
    values = {path: option.default for path, option in options.items() if option.is_preset}
    values |= flatten(defaults or {}, options)
    values |= sampling_of_model(model, {**values, **given}, options) | dict(given)
    tree = nest(values)
    for name, field in model.model_fields.items():
        if field.is_required() and is_section(field.annotation):
            tree.setdefault(name, {})
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        raise config_error(_explained(fault, values, options, where) for fault in found) from None


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
    message = re.sub(
        r"^Value error, |, unable to parse string as .*$", "", error["msg"].rstrip(".")
    )
    message = re.sub(r"^Input should be ", "must be ", message)
    shown = _shown(values[path]) if path in values and option and not option.secret else ""
    return f"{where(path)}: {message}{shown}."


def _path_of(location: Sequence[int | str], options: Mapping[str, Option]) -> str:
    """Returns the option at or around `location`, or `location` itself."""
    paths = [*accumulate(map(str, location), "{}.{}".format)]
    return next((path for path in paths if path in options), paths[-1] if paths else "")


def _shown(value: Any) -> str:
    text = re.sub(r"//[^/@\s]*@", "//***@", str(value))
    return f" (given: {text[:_LONGEST_VALUE_SHOWN]})"
