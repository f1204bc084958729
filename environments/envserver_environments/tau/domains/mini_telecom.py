"""A small invented phone company: telecom's tools over invented customers, with different rules.

Its files are shipped in tau/data/mini_telecom. Besides tau2-bench's fields each task has a
`user_script`, for a customer without a model: rules of which the first match is followed, each
`{"if": pattern in the assistant's last text (case-insensitive) or "always", "calls": [{"name",
"arguments"}] of the customer's own tools (optional), "say": the customer's text after them, in
which {result} is replaced by the last call's result}`.
"""

from __future__ import annotations

from dataclasses import replace

from .telecom.domain import TELECOM

MINI_TELECOM = replace(TELECOM, name="mini_telecom", policy_parts=(), folder="mini_telecom")
