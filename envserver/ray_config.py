"""`--ray.*`: environments on the nodes of a Ray cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from .described import Section


class RayConfig(Section):
    """Runs the environments in actors on the nodes of a Ray cluster (docs/ray.md)."""

    address: str = ""
    """Ray cluster: auto (the one of this machine or job), or HOST:PORT; also `--ray ADDRESS`;
    unset: the environments run in this process."""
    runners: int | None = Field(default=None, ge=1)
    """Number of runners, each with its own workers; unset: between `ray.min` and `ray.max`, as the
    load wants."""
    min: int = Field(default=1, ge=1)
    """Minimum number of runners."""
    max: int | None = Field(default=None, ge=1)
    """Maximum number of runners; unset: as many as the cluster has room for now."""
    cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray reserves for a runner."""
    resources: dict[str, float] = {}
    """Other resources that a runner needs, such as {"env": 1}."""
    labels: dict[str, str] = {}
    """Labels of the nodes for runners, such as {"zone": "a"} or {"zone": "!in(b)"}."""
    runtime_env: str = ""
    """Ray's runtime environment of the runners, as JSON or a file (YAML, JSON): working_dir,
    env_vars, pip, py_modules. A relative --env FILE is then looked for in its working_dir."""
    url: str = ""
    """Address at which the nodes reach this server; unset: this machine's in the cluster."""
    token: SecretStr = SecretStr("")
    """Access token of the runners, with the role `environment`, if the server asks for tokens."""
    place_seconds: float = Field(default=5.0, ge=0)
    """Seconds for a node to come on which a runner fits; longer where the cluster adds nodes from
    none by itself."""
    idle_seconds: float = Field(default=60.0, ge=0)
    """Seconds for which fewer runners must be enough before one is stopped."""

    @field_validator("runtime_env")
    @classmethod
    def _is_readable(cls, value: str) -> str:
        _runtime_env(value)
        return value

    @field_validator("address")
    @classmethod
    def _is_no_client(cls, value: str) -> str:
        if value.startswith("ray://"):
            raise ValueError("Ray Client is not enough: run on a node, or with `ray job submit`")
        return value

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if value and urlsplit(value).scheme not in ("http", "https"):
            raise ValueError("an address must look like http://host:8000")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _bounds_fit(self) -> RayConfig:
        if self.max is not None and self.max < self.min:
            raise ValueError("ray.max is smaller than ray.min")
        return self

    @property
    def environment_of_runners(self) -> dict[str, Any]:
        """Ray's runtime environment; empty: that of the nodes."""
        return _runtime_env(self.runtime_env)

    def wants(self) -> str:
        """Returns what a runner needs, as text."""
        needs = {"CPU": self.cpus, **self.resources}
        text = ", ".join(f"{name} {amount:g}" for name, amount in needs.items() if amount)
        labels = ", ".join(f"{name}={value}" for name, value in self.labels.items())
        return f"{text or 'nothing'}{f' and the label {labels}' if labels else ''}"


def _runtime_env(value: str) -> dict[str, Any]:
    if not value:
        return {}
    import yaml

    try:
        text = value if value.lstrip().startswith("{") else Path(value).read_text("utf-8")
        read = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"is neither JSON nor a readable file: {error}") from None
    if not isinstance(read, dict):
        raise ValueError("must be a mapping, such as {working_dir: .}")
    return cast(dict[str, Any], read)
