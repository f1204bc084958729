"""Imports what Inspect imports during its first evaluation: two seconds of work, for workers that
are forked afterwards (`InspectTask.preload`)."""

from __future__ import annotations

import importlib
from contextlib import suppress

_IMPORTED_LATE = (
    "openai",
    "inspect_ai.agent._acp.server",
    "inspect_ai.agent._acp.transport_live",
    "inspect_ai._control.config_record",
    "inspect_ai._control.scoring",
    "inspect_ai.hooks._startup",
    "inspect_ai.model._providers.anthropic",
    "inspect_ai.model._providers.openai_compatible",
    "inspect_ai.solver._transcript",
    "IPython",
    "uvicorn",
)

with suppress(ImportError):
    from inspect_ai.model._model_info import _get_lookup_index

    _get_lookup_index()  # reads files that describe models

for _name in _IMPORTED_LATE:
    with suppress(ImportError):  # other versions of Inspect have other modules
        importlib.import_module(_name)
