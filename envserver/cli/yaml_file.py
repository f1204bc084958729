"""The YAML file of --config: its values with their lines."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from envserver_records.errors import ConfigError, NotFoundError

from .sources import Given, as_list, read_text

_MAPPING = "tag:yaml.org,2002:map"


class YamlFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._names_environment = False
        if not path.is_file():
            raise NotFoundError(f"--config: there is no file {str(path)!r}.")
        text = read_text(path)
        try:
            self._loader = yaml.SafeLoader(text)
            self._root: yaml.Node | None = self._loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            raise ConfigError(f"{path}:{line}: not valid YAML: {error.problem}.") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not valid YAML: {error}.") from None
        except RecursionError:
            raise ConfigError(f"{path}: nested too deeply.") from None

    def read(self, options: Collection[str]) -> list[Given]:
        """Returns every value; `options` (paths) decides which mappings are sections."""
        return [] if self._root is None else self._walk(self._root, "", options)

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
        merged: dict[str, Given] = {}
        for child in node.value:
            for given in self._walk(child, "openai.", options):
                first = merged.get(given.path)
                if first is None:
                    merged[given.path] = given
                elif given.path == "openai.base_url":
                    urls = [*as_list(first.value), *as_list(given.value)]
                    merged[given.path] = Given(first.path, urls, first.origin, "file")
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
        return Given(path, self._value(node), self._place(node), "file")

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


def _is_prefix(path: str, options: Collection[str]) -> bool:
    return any(known.startswith(f"{path}.") for known in options)
