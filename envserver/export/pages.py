"""Self-contained HTML pages: no script, no other file; all that is inserted is escaped."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jinja2

from ..formats.shown_text import seen


def template(package: str, name: str, **filters: Callable[..., Any]) -> jinja2.Template:
    """Returns a template of a package; it may extend `page.html`, the frame of all pages.

    Invisible characters of data are made visible; a content policy forbids scripts and requests.
    """
    made = _environment(package)
    made.filters |= {"time": _time, **filters}
    return made.get_template(name)


@functools.cache
def _environment(package: str) -> jinja2.Environment:
    own, shared = jinja2.PackageLoader(package), jinja2.PackageLoader(__package__)
    return jinja2.Environment(
        loader=jinja2.ChoiceLoader([own, shared]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=seen,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "unknown"
