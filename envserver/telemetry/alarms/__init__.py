"""Alarms in words: what is wrong with a running server, in sentences with numbers.

In: the server's numbers over time (`telemetry.history`) and a few facts. Out: alarms that begin
and end. `situation.py` reads the numbers, `rules.py` has the table of rules, `book.py` keeps the
active ones.
"""

from .book import Alarm, AlarmBook
from .rules import NEEDED, RULES, findings
from .situation import AlarmFacts, Finding, Situation

__all__ = [
    "NEEDED",
    "RULES",
    "Alarm",
    "AlarmBook",
    "AlarmFacts",
    "Finding",
    "Situation",
    "findings",
]
