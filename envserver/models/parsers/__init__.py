"""Text that a model wrote -> calls of tools.

Each format is a function of text; which one a model uses is seen in how its chat template writes a
call down: the format that reads it back is the right one.
"""

from .calls import ParsedCall, ParsedCalls, Tools
from .choosing import FORMATS, detect_format

__all__ = ["FORMATS", "ParsedCall", "ParsedCalls", "Tools", "detect_format"]
