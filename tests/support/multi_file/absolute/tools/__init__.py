"""A package of the user with a common name."""

from types import ModuleType


def reading_program(module: ModuleType) -> str:
    """A program that prints the file of `module`."""
    return f"print(open({module.__file__!r}).read())"
