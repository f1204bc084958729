"""Parses a model's text into reasoning, content and tool calls.

Used for engines that take a prompt of ids but do not parse the answer. The call formats are those
of `models.parsers`. Answers that the engine parsed itself are compared with this parser's result.
"""

from .answer_parser import AnswerParser, calls_are_free, format_of_calls, keeps_special

__all__ = ["AnswerParser", "calls_are_free", "format_of_calls", "keeps_special"]
