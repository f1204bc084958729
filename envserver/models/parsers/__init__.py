"""Text that a model wrote -> calls of tools.

Each format is a function of text; which one a model uses is seen in how its chat template writes a
call down: the format that reads it back is the right one.
"""

from .calls import Called, Found, Tools
from .choosing import FORMATS, chosen

__all__ = ["FORMATS", "Called", "Found", "Tools", "chosen"]
