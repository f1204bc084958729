"""A small shop of our own: retail's tools over invented customers and goods, with own rules.

Its files are shipped in tau/data/mini_retail; scripts as in `mini_telecom.py`. Prices
are multiples of a quarter dollar, so that sums of them are exact in whatever order they are made.
"""

from __future__ import annotations

from dataclasses import replace

from .retail import RETAIL

MINI_RETAIL = replace(RETAIL, name="mini_retail", folder="mini_retail")
