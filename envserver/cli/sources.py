"""Sources of settings besides the command line: environment variables, `.env`, a YAML file.

Each reader returns `Given`s: a dotted path, a value and its origin (`--env.seed`, `run.yaml:12`).
Text of flags and variables is parsed later, when the type is known; only the form of the source is
checked here.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from dotenv.parser import parse_stream
from envserver_records.errors import ConfigError, NotFoundError

VARIABLE_PREFIX = "ENVSERVER_"
_OF_TESTS = "ENVSERVER_TEST_"
_SERVICE_LINK = re.compile(
    r"\w+_(SERVICE_HOST=|SERVICE_PORT(_\w+)?=|PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)=|"
    r"PORT(_\d+_(TCP|UDP|SCTP))?=(tcp|udp|sctp)://)"
)
"""NAME=value as Kubernetes and Docker links add it for a service called `envserver...`; a port that
is a number is a setting."""
_MAPPING = "tag:yaml.org,2002:map"
_DOTENV_HINT = "Lines look like NAME=value."


@dataclass(frozen=True)
class Given:
    """A value given in a source.

    Args:
        path: dotted name.
        value: text, or the parsed value of a YAML file; None also for a flag without a value.
        origin: the flag, the variable (after `.env:line` if it comes from there) or `file:line`.
        kind: flag, variable or file.
        is_text: whether `value` must still be parsed by the option's type.
    """

    path: str
    value: Any
    origin: str
    kind: str
    is_text: bool = True

    @property
    def where(self) -> str:
        """Returns the origin for error messages."""
        return f"{self.origin}: {self.path}" if self.kind == "file" else self.origin


def read_variables(environ: Mapping[str, str]) -> list[Given]:
    """Reads variables such as `ENVSERVER_ENV__GROUP_SIZE`; ignores others and Kubernetes' own."""
    return [
        Given(_variable_path(name), value, name, "variable")
        for name, value in sorted(environ.items())
        if _is_setting(name) and not _SERVICE_LINK.match(f"{name.upper()}={value}")
    ]


def read_dotenv(path: Path) -> list[Given]:
    """Reads variables from a `.env` file; a missing file has no settings.

    Raises:
        ConfigError: a line with one of our variables cannot be read.
    """
    if not path.is_file():
        return []
    given = []
    for binding in parse_stream(io.StringIO(_read_text(path))):
        origin = f"{path.name}:{binding.original.line}"
        if binding.error and VARIABLE_PREFIX in binding.original.string.upper():
            raise ConfigError(f"{origin}: cannot be read.", hint=_DOTENV_HINT)
        if binding.key is None or not _is_setting(binding.key):
            continue
        if binding.value is None:
            raise ConfigError(f"{origin}: {binding.key} has no value.", hint=_DOTENV_HINT)
        origin = f"{origin}: {binding.key}"
        given.append(Given(_variable_path(binding.key), binding.value, origin, "variable"))
    return given


def read_dotenv_values(path: Path, names: Collection[str]) -> dict[str, str]:
    """Reads the variables `names`, which are not ours, from a `.env` file if there is one."""
    if not path.is_file():
        return {}
    return {
        binding.key: binding.value
        for binding in parse_stream(io.StringIO(_read_text(path)))
        if binding.key is not None and binding.key in names and binding.value is not None
    }


class YamlFile:
    """A YAML file that keeps the line of each value; path None is an empty file.

    Raises:
        NotFoundError: there is no such file.
        ConfigError: it is not valid YAML, or not a mapping at the top level.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._root: yaml.Node | None = None
        self._names_environment = False
        if path is None:
            return
        if not path.is_file():
            raise NotFoundError(f"--config: there is no file {str(path)!r}.")
        self._loader = yaml.SafeLoader(_read_text(path))
        try:
            self._root = self._loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            raise ConfigError(f"{path}:{line}: not valid YAML: {error.problem}.") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not valid YAML: {error}.") from None

    def read(self, options: Collection[str]) -> list[Given]:
        """Returns every value; `options` (paths) decides which mappings are sections."""
        if self._root is None:
            return []
        return self._walk(self._root, "", options)

    def names_in(self, section: str) -> list[str]:
        """Yields the names below `section` (a dotted path) as full paths."""
        node: yaml.Node | None = self._root
        for part in section.split("."):
            children = node.value if isinstance(node, yaml.MappingNode) else []
            node = next((child for key, child in children if key.value == part), None)
        children = node.value if isinstance(node, yaml.MappingNode) else []
        return [f"{section}.{key.value}" for key, _ in children]

    def _walk(self, node: yaml.Node, prefix: str, options: Collection[str]) -> list[Given]:
        given: list[Given] = []
        items = self._items(node, prefix)
        if prefix == "":
            self._names_environment = any(name == "environment" for name, _ in items)
        for name, child in items:
            path = f"{prefix}{name}"
            if path == "env" and isinstance(child, yaml.ScalarNode):
                path = "environment" if self._value(child) is not None else path
            elif path == "env.name" and not self._names_environment:
                path = "environment"
            if path == "openai" and isinstance(child, yaml.SequenceNode):
                given += self._replicas(child, options)
            elif path in options or not _is_prefix(path, options):
                given.append(self._given(path, child))
            elif self._is_null(child):
                continue
            else:
                given += self._walk(child, f"{path}.", options)
        return given

    def _replicas(self, node: yaml.SequenceNode, options: Collection[str]) -> list[Given]:
        """Reads an Atropos list of engines as one engine with several addresses."""
        merged: dict[str, Given] = {}
        for child in node.value:
            for given in self._walk(child, "openai.", options):
                first = merged.get(given.path)
                if first is None:
                    merged[given.path] = given
                elif given.path == "openai.base_url":
                    urls = [*as_list(first.value), *as_list(given.value)]
                    merged[given.path] = Given(first.path, urls, first.origin, "file", False)
                elif given.value != first.value:
                    raise ConfigError(
                        f"{given.origin}: {given.path} differs from {first.origin}.",
                        hint="Several engines must serve the same model in the same way.",
                    )
        return list(merged.values())

    def _items(self, node: yaml.Node, prefix: str) -> list[tuple[str, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode) or node.tag != _MAPPING:
            what = prefix.rstrip(".") or "the file"
            raise ConfigError(f"{self._place(node)}: {what} must be a mapping of names to values.")
        seen: dict[str, str] = {}
        for key, _ in node.value:
            if key.value in seen:
                place = self._place(key)
                raise ConfigError(f"{place}: {key.value!r} is given twice ({seen[key.value]}).")
            seen[str(key.value)] = self._place(key)
        self._loader.flatten_mapping(node)
        return [(str(key.value), child) for key, child in node.value]

    def _given(self, path: str, node: yaml.Node) -> Given:
        return Given(path, self._value(node), self._place(node), "file", is_text=False)

    def _value(self, node: yaml.Node) -> Any:
        try:
            return self._loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            problem = getattr(error, "problem", None) or str(error)
            raise ConfigError(f"{self._place(node)}: {problem}.") from None

    def _is_null(self, node: yaml.Node) -> bool:
        return isinstance(node, yaml.ScalarNode) and self._value(node) is None

    def _place(self, node: yaml.Node) -> str:
        return f"{self._path}:{node.start_mark.line + 1}"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None


def _is_setting(name: str) -> bool:
    upper = name.upper()
    return upper.startswith(VARIABLE_PREFIX) and not upper.startswith(_OF_TESTS)


def _variable_path(name: str) -> str:
    path = name[len(VARIABLE_PREFIX) :].lower().replace("__", ".")
    return "environment" if path in ("env", "env.name") else path


def _is_prefix(path: str, options: Collection[str]) -> bool:
    return any(known.startswith(f"{path}.") for known in options)


def as_list(value: Any) -> list[Any]:
    """Returns `value` if it is a list, else a list of it."""
    return list(value) if isinstance(value, list) else [value]
