"""A small phone company of our own: telecom's tools over invented customers, with own rules.

Its files are shipped in environments/tau/data/mini_telecom.
"""

from __future__ import annotations

from dataclasses import replace

from .telecom.domain import TELECOM

MINI_TELECOM = replace(TELECOM, name="mini_telecom", policy_parts=(), folder="mini_telecom")
