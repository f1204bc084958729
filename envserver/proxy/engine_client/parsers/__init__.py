"""Text that a model wrote -> reasoning, content, tool calls.

For engines that take a prompt of ids but then parse nothing. Formats of calls are those of
`models.parsers`; whether a text is read as the engine's own parser does is proven on the answers
that the engine parsed itself.
"""

from .answer_parser import AnswerParser, calls_are_free, format_of_calls, keeps_special

__all__ = ["AnswerParser", "calls_are_free", "format_of_calls", "keeps_special"]
