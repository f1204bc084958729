"""Makes checked settings from values by dotted path; shared by command line and Python API."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from envserver_records.errors import ConfigError
from pydantic import BaseModel, ValidationError, create_model

from ..config import EngineConfig, Section
from ..environment_config import EnvironmentConfig
from .options import Option, flatten, is_section, nest

S = TypeVar("S", bound=Section)

_LONGEST_VALUE_SHOWN = 80


def with_environment(
    settings_class: type[S], reference: str, config_class: type[EnvironmentConfig] | None = None
) -> type[S]:
    """Returns `settings_class` with the environment's own Config class as the type of `env`.
    Raises NotFoundError, ConfigError: `reference` names no environment, and no class is given.
    """
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

    Those that change the distribution are left out of settings `model` for training: they are
    someone's taste in answers, and trainers learn from the model's own distribution.
    Raises NotFoundError, ConfigError: there is no such model, or its file is invalid.
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


def validated(
    model: type[S],
    values: dict[str, Any],
    options: Mapping[str, Option],
    where: Callable[[str], str],
) -> S:
    """Makes `model` from values by dotted path.

    Args:
        where: says where the value of a path was given, or how to give it.

    Raises:
        ConfigError: values are wrong or missing; one line for each. Secrets are not shown.
    """
    tree = nest(values)
    for name, field in model.model_fields.items():
        if field.is_required() and is_section(field.annotation):
            tree.setdefault(name, {})
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        problems = [
            _explained(one["type"], one["loc"], one["msg"], values, options, where) for one in found
        ]
        problems = list(dict.fromkeys(problems))
        raise ConfigError("\n".join(problems), problems=problems) from None


def _explained(
    kind: str,
    location: Sequence[int | str],
    message: str,
    values: Mapping[str, Any],
    options: Mapping[str, Option],
    where: Callable[[str], str],
) -> str:
    path = _path_of(location, options)
    option = options.get(path)
    if kind == "missing":
        about = f" ({option.description.rstrip('.')})" if option and option.description else ""
        return f"{where(path)} is needed{about}."
    message = re.sub(r"^Value error, ", "", message)
    message = re.sub(r"^Input should be ", "must be ", message)
    message = re.sub(r", unable to parse string as .*$", "", message.rstrip("."))
    shown = _shown(values[path]) if path in values and option and not option.secret else ""
    return f"{where(path)}: {message}{shown}."


def _path_of(location: Sequence[int | str], options: Mapping[str, Option]) -> str:
    """Returns the option at pydantic's location; the section if it is about several options."""
    parts: list[str] = []
    for part in location:
        parts.append(str(part))
        if ".".join(parts) in options:
            break
    return ".".join(parts)


def _shown(value: Any) -> str:
    text = re.sub(r"//[^/@\s]*@", "//***@", str(value))
    return f" (given: {text[:_LONGEST_VALUE_SHOWN]})"
