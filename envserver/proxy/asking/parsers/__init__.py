"""Text that a model wrote -> reasoning, content, tool calls.

For engines that take a prompt of ids but then parse nothing. Each format of tool calls is a
function of text; which one a model uses is seen in how its chat template writes a call down: the
format that reads it back is the right one. Whether that is read as the engine's own parser does is
proven on the answers that the engine parsed itself.
"""

from .reading import Reader, calls_are_free, keeps_special

__all__ = ["Reader", "calls_are_free", "keeps_special"]
