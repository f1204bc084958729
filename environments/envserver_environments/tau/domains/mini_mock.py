"""To-do lists of an invented office: mock's tools of both sides, with different rules.

Its files are shipped in tau/data/mini_mock; scripts as in `mini_telecom.py`.
"""

from __future__ import annotations

from dataclasses import replace

from .mock import MOCK

MINI_MOCK = replace(MOCK, name="mini_mock", folder="mini_mock")
