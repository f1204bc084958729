"""Writes the package of a new environment: `envserver init my-env --kind tools`.

The environments of the kinds are modules of `kinds`, checked like our own code; `package` has the
files around them.
"""

from __future__ import annotations

import importlib.util
import json
import keyword
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2
from envserver_records.errors import ConfigError, ConflictError
from envserver_records.tasks import Json

_HERE = Path(__file__).parent
_HELD: dict[str, list[Json]] = json.loads((_HERE / "rows.json").read_text(encoding="utf-8"))
ROWS: dict[str, list[Json]] = {
    "single": _HELD["questions"],
    "tools": _HELD["shopping"],
    "multi-agent": _HELD["questions"],
    "sandbox": _HELD["programs"],
    "judge": _HELD["texts"],
    "game": [{"most": 100, "secret": secret} for secret in (7, 42, 64, 91)],
    "smolagents": _HELD["shopping"],
}
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


@dataclass(frozen=True)
class Kind:
    """A kind of environment; `scoring` and `reward` are for the card.

    `isolation` is that of `Environment`; `requires`: what it needs besides envserver.
    """

    about: str
    scoring: str
    reward: str = "0 or 1"
    isolation: str = "pooled"
    requires: tuple[str, ...] = ()


KINDS = {
    "single": Kind("answer a question in one word", "the answer, whatever its case"),
    "tools": Kind("ask for prices with a tool, and add them up", "the only number in the answer"),
    "multi-agent": Kind(
        "a solver answers, a critic judges the answer",
        "the solver for the right answer, the critic for being right about it",
        "0 or 1 for each agent",
    ),
    "sandbox": Kind(
        "write a program that prints the right line for each input",
        "hidden cases, run in a sandbox without network",
    ),
    "judge": Kind(
        "summarise a text in one sentence",
        "a rule (facts, length); with `--env.judged true` a judge marks the other half",
        "0 to 1",
    ),
    "game": Kind(
        "guess a number that only the server knows",
        "0.1 less for each guess more than halving needs",
        "0 to 1",
    ),
    "smolagents": Kind(
        "ask for prices with a tool, and add them up (an agent of smolagents)",
        "the final answer",
        isolation="dedicated",
        requires=("smolagents>=1.20",),
    ),
}


def create(name: str, kind: str, parent: Path) -> list[Path]:
    """Writes the package `name` below `parent`; returns its files."""
    package = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(package):
        raise ConfigError(
            f"{name!r} cannot be the name of a package.",
            hint="Use lower-case letters, digits and single dashes, such as my-env.",
        )
    if _is_taken(package):
        raise ConfigError(f"A module {package!r} already exists.", hint="Choose another name.")
    folder = parent / name
    if folder.exists():
        raise ConflictError(f"{folder} exists.", hint="Choose another name, or remove it.")
    written = []
    for path, text in files(name, kind):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        written.append(target)
    return written


def files(name: str, kind: str) -> Iterator[tuple[str, str]]:
    package = name.replace("-", "_")
    title = "".join(part.capitalize() for part in package.split("_"))

    def renamed(text: str) -> str:
        return text.replace("my_env", package).replace("MyEnv", title).replace("my-env", name)

    facts = {"kind": kind, "facts": KINDS[kind], "rows": ROWS[kind]}
    module = kind.replace("-", "_")
    yield f"{package}/env.py", renamed((_HERE / "kinds" / f"{module}.py").read_text("utf-8"))
    yield f"{package}/__init__.py", f'"""The environment `{package}`."""\n'
    yield f"{package}/rows.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS[kind])
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "package"),
        keep_trailing_newline=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
    for template, path in (
        ("pyproject.toml.txt", "pyproject.toml"),
        ("README.md.txt", "README.md"),
        ("test.py.txt", f"tests/test_{package}.py"),
    ):
        yield path, renamed(templates.get_template(template).render(facts))


def _is_taken(package: str) -> bool:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return True
    return spec is not None and spec.origin is not None
