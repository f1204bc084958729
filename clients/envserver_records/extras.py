"""The command that installs a missing extra, for an installation like this one.

Out: in a checkout `pip install -e clients -e '.[gaia]'`; from a repository or an archive its
address, `pip install 'envserver[gaia] @ git+https://...'`; else `pip install 'envserver[gaia]'`.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from shlex import quote
from urllib.parse import unquote, urlsplit

SERVER = "envserver"
CLIENTS = "envserver-clients"


def install_command(extra: str, project: str = SERVER) -> str:
    """Returns the pip command that adds `extra` to `project`."""
    wanted = _requirement(project, extra)
    if wanted is None:
        return f"pip install {quote(f'{project}[{extra}]')}"
    others = _requirement(CLIENTS) if project == SERVER else None
    return " ".join(["pip install", *filter(None, [others]), wanted])


def missing_module_hint(module: str) -> str:
    """Returns what to do about a module that cannot be imported."""
    extra = _extra_with(module.partition(".")[0])
    if extra is not None:
        return f"{install_command(extra)} installs it."
    return "Is it installed, or beside the environment's file?"


def _requirement(project: str, extra: str = "") -> str | None:
    """pip's argument for `project`, from where it was installed; None: from an index."""
    found = _distribution(project)
    origin = json.loads((found and found.read_text("direct_url.json")) or "{}")
    if not origin:
        return None
    name = f"{project}[{extra}]" if extra else project
    if "dir_info" not in origin:  # a repository or an archive
        vcs, inside = origin.get("vcs_info"), origin.get("subdirectory")
        url = f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}" if vcs else origin["url"]
        return quote(f"{name} @ {url}" + (f"#subdirectory={inside}" if inside else ""))
    folder = Path(unquote(urlsplit(origin["url"]).path))
    here = Path.cwd()
    place = str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)
    editable = "-e " if origin["dir_info"].get("editable") else ""
    if not editable and not place.startswith((".", "/")):
        place = f"./{place}"  # else pip looks for a project of this name
    return editable + quote(f"{place}[{extra}]" if extra else place)


def _extra_with(module: str) -> str | None:
    """The smallest extra of the server that installs `module` by its own name."""
    found = _distribution(SERVER)
    pattern = re.compile(rf"{_normal(module)}\b(?!-).*extra == '([\w-]+)'")
    matches = [pattern.match(_normal(line)) for line in (found and found.requires) or []]
    extras = [match[1] for match in matches if match is not None and match[1] != "all"]
    return min(extras, default=None)


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


def _distribution(project: str) -> Distribution | None:
    try:
        return distribution(project)
    except PackageNotFoundError:
        return None
