"""The manifest of an environment: what a person should know before using it.

A package may have an `environment.yaml` beside its pyproject.toml (for `env push`) or in the
package itself, with one YAML document per environment. What the code and the package's metadata
say is filled in, and must not be contradicted; the rest only the author can say.

    name: sums
    version: 1.0.0
    licence: MIT
    isolation: pooled
    reward_range: [0.0, 1.0]
    determinism: The same tasks for the same settings; scoring is exact.
    data_sources: ["GSM8K, MIT, https://huggingface.co/datasets/openai/gsm8k"]
    score_card: README.md
"""

from __future__ import annotations

from typing import Any

import msgspec
import yaml
from envserver_records.errors import ConfigError

from .description import Description


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A manifest.

    Args:
        name: of the environment, as `--env` takes it.
        version, licence: of the package; the licence as an SPDX expression.
        isolation, reward_range: as the class declares them.
        determinism: in words, what is the same for the same settings.
        score_card: the file with the results of `envserver check`.
    """

    name: str
    version: str = ""
    licence: str = ""
    isolation: str = ""
    reward_range: tuple[float, float] | None = None
    determinism: str = ""
    data_sources: list[str] = []
    score_card: str = ""


def read_manifests(text: str, place: str) -> dict[str, Manifest]:
    try:
        documents = [each for each in yaml.safe_load_all(text) if each is not None]
        made = [msgspec.convert(each, Manifest, strict=False) for each in documents]
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigError(f"{place}: {' '.join(str(error).split())}") from error
    return {manifest.name: manifest for manifest in made}


def completed(
    manifest: Manifest, described: Description | None, version: str, licence: str, place: str
) -> Manifest:
    facts: dict[str, Any] = {"version": version, "licence": licence}
    if described is not None:
        low, high = described.declared["reward_range"]
        facts["isolation"] = described.declared["isolation"]
        facts["reward_range"] = (float(low), float(high))
    for name, fact in facts.items():
        said = getattr(manifest, name)
        if said and fact and said != fact:
            raise ConfigError(
                f"{place}: {name} of {manifest.name!r} is {_shown(said)}, but the package says "
                f"{_shown(fact)}.",
                hint="Correct the manifest, or remove the line: it is filled in.",
            )
    missing = {name: fact for name, fact in facts.items() if not getattr(manifest, name)}
    return msgspec.structs.replace(manifest, **missing)


def _shown(value: Any) -> str:
    return f"{list(value)}" if isinstance(value, tuple) else repr(value)


def as_yaml(manifests: list[Manifest]) -> str:
    data = [msgspec.to_builtins(manifest) for manifest in manifests]
    for entry in data:
        entry["reward_range"] = list(entry["reward_range"] or ()) or None
    return yaml.safe_dump_all(data, sort_keys=False, allow_unicode=True)
