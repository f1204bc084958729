"""The old name of a part of engine_stand_in."""

from support.engine_stand_in import ASK, END, ScaleOut

__all__ = ["ASK", "END", "ScaleOut"]
