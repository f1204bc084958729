"""A small phone company of our own: telecom's tools over invented customers, with own rules.

Its files are shipped in tau/data/mini_telecom. Beside tau2-bench's fields each task
has a `user_script`, for a customer without a model: rules of which the first that fits is followed,
each `{"if": pattern found in the assistant's last text (case does not count) or "always", "calls":
[{"name", "arguments"}] of his own tools (may be absent), "say": his words after them, in which
{result} stands for what the last call returned}`.
"""

from __future__ import annotations

from dataclasses import replace

from .telecom.domain import TELECOM

MINI_TELECOM = replace(TELECOM, name="mini_telecom", policy_parts=(), folder="mini_telecom")
