"""Parses tool calls in text that a model wrote.

Each format is a function of text. A model's format is found by rendering a call with its chat
template: the format that reads the call back is the right one.
"""

from .calls import ParsedCall, ParsedCalls, Tools
from .choosing import FORMATS, detect_format

__all__ = ["FORMATS", "ParsedCall", "ParsedCalls", "Tools", "detect_format"]
