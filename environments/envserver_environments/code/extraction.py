"""Finds the program in a model's message. Pure.

Only fenced blocks of the visible text count: the last one that parses and defines the function at
its top level (or as a method of a class Solution), else the last one. If no function is asked for:
the last one that parses and is labelled Python, else the last one that parses and has no label,
else the last one. Text outside of a fence is never a program.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator
from itertools import islice

from envserver_tools.visible import visible_text

MAX_CODE_CHARACTERS = 50_000
"""Longer programs are ignored."""

_PYTHON = ("python", "py", "python3", "{python}")
_CLOSINGS = 8
"""Fences that are tried as the closing one."""
_OPENING = re.compile(r"(?m)^([ \t]*)(`{3,}|~{3,})[ \t]*([^\n`]*)\n")


def extract_code(text: str, entry_point: str) -> str | None:
    """Returns the program in `text` for `entry_point` ("": a whole program), or None."""
    seen = visible_text(text.replace("\r\n", "\n"))
    blocks = [] if seen is None else list(_named_blocks(seen))
    if not blocks:
        return None
    if entry_point:
        good = [block for _, block in blocks if entry_point in defined_names(block)]
        return good[-1] if good else blocks[-1][1]
    for names in (_PYTHON, ("",)):
        good = [block for name, block in blocks if name in names and _is_program(block)]
        if good:
            return good[-1]
    return blocks[-1][1]


def _is_program(block: str) -> bool:
    tree = parsed(block)
    return tree is not None and bool(tree.body)


def fenced_blocks(text: str) -> Iterator[str]:
    """Returns the contents of the closed fenced blocks of `text`, in order."""
    return (inside for _, inside in _named_blocks(text))


def _named_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yields each block with the first word after its opening fence."""
    position = 0
    while opening := _OPENING.search(text, position):
        indent, fence = opening[1], opening[2]
        inside, position = _until_closed(text, opening.end(), fence)
        if inside is None:
            return
        name = next(iter(opening[3].lower().split()), "")
        yield name, re.sub(f"(?m)^[ \t]{{1,{len(indent)}}}", "", inside) if indent else inside


def defined_names(code: str) -> set[str]:
    """Returns the names defined at the top level of `code`; empty if it cannot be parsed."""
    tree = parsed(code)
    names: set[str] = set()
    for statement in tree.body if tree else []:
        match statement:
            case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                names.add(statement.name)
                if isinstance(statement, ast.ClassDef) and statement.name == "Solution":
                    names.update(n.name for n in statement.body if isinstance(n, ast.FunctionDef))
            case ast.Assign():
                names.update(t.id for t in statement.targets if isinstance(t, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Import() | ast.ImportFrom():
                names.update(alias.asname or alias.name for alias in statement.names)
    return names


def parsed(code: str, limit: int | None = MAX_CODE_CHARACTERS) -> ast.Module | None:
    """Parses `code`; returns None if it is not Python or longer than `limit` characters."""
    if limit is not None and len(code) > limit:
        return None
    try:
        with warnings.catch_warnings():
            # Warnings about invalid escapes in a model's program do not matter here.
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _until_closed(text: str, start: int, fence: str) -> tuple[str | None, int]:
    """Returns the text before the closing fence, and the position where it ends.

    A program may contain fences in its strings: the closing fence is the first one preceded by a
    valid program, on a line of its own if possible, else the first of all.
    """
    mark = re.escape(fence)
    alone = re.compile(rf"(?m)^[ \t]*{mark}[{fence[0]}]*[ \t]*$")
    anywhere = re.compile(mark)
    for closing in (alone, anywhere):
        for found in islice(closing.finditer(text, start), _CLOSINGS):
            inside = text[start : found.start()]
            if parsed(textwrap.dedent(inside)) is not None:
                return inside, found.end()
    first = anywhere.search(text, start)
    return (None, len(text)) if first is None else (text[start : first.start()], first.end())
