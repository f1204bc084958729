"""The texts that the model gets; each system prompt is a file beside this one."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from ..course import COURSE, GRAPH, TOOLS, PlanError


@functools.cache
def system_prompt(name: str) -> str:
    """The system prompt of a profile, or of the search agent; schemas are filled in."""
    text = (Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8").strip()
    for mark, schema in (("TOOLS", TOOLS), ("GRAPH", GRAPH), ("COURSE", COURSE)):
        shown = {key: value for key, value in schema.items() if key != "$schema"}
        text = text.replace(f"<{mark}>", json.dumps(shown))
    return text


def repair_request(error: PlanError) -> str:
    return f"The plan is not valid ({error.kind}). {error}\nAnswer with the corrected JSON only."
