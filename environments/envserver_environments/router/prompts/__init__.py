"""The texts that the model gets; each system prompt is a file beside this one."""

from __future__ import annotations

import functools
import json

from envserver_environments.demonstrations import prompt_beside

from ..course import COURSE, GRAPH, TOOLS, PlanError


@functools.cache
def system_prompt(name: str) -> str:
    """The system prompt of a profile, or of the search agent; schemas are filled in."""
    text = prompt_beside(__file__, name)
    for mark, schema in (("TOOLS", TOOLS), ("GRAPH", GRAPH), ("COURSE", COURSE)):
        shown = {key: value for key, value in schema.items() if key != "$schema"}
        text = text.replace(f"<{mark}>", json.dumps(shown))
    return text


def repair_request(error: PlanError) -> str:
    return f"The plan is not valid ({error.kind}). {error}\nAnswer with the corrected JSON only."
