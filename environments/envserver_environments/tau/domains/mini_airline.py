"""A small airline of our own: airline's tools over invented flights and customers, with own rules.

Its files are shipped in tau/data/mini_airline; scripts as in `mini_telecom.py`. What
the tools have built in holds here too: the day (2024-05-15), the airports, 50 dollars for a bag.
"""

from __future__ import annotations

from dataclasses import replace

from .airline import AIRLINE

MINI_AIRLINE = replace(AIRLINE, name="mini_airline", folder="mini_airline")
