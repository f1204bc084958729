"""Self-contained HTML pages: no script, no other file; all that is inserted is escaped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import jinja2

from ..formats.shown_text import seen

_NO_FILTERS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType({})


def template(
    package: str, name: str, filters: Mapping[str, Callable[..., Any]] = _NO_FILTERS
) -> jinja2.Template:
    """Returns a template of a package; it may extend `page.html`, the frame of all pages.

    Invisible characters of data are made visible; a content policy forbids scripts and requests.
    """
    made = _environment(package)
    made.filters |= filters
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
