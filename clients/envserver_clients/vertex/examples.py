"""Converts rows to lines in the service's form, within its limits.

In: rows, one at a time. Out: `train.jsonl`, `validation.jsonl` and counts. What always holds: each
line ends with the model's answer; roles alternate; the service accepts every line; left out rows
are counted by reason.

The form of Gemini's lines follows the page "Prepare supervised fine-tuning data for Gemini
models": `contents` of `role` (user, model) and `parts` of `text`, and a `systemInstruction`. Open
models take `messages` (role, content). Limits: "About supervised fine-tuning for Gemini models".
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TextIO

from envserver_records import InputError
from envserver_records.files import replacing_path

from envserver_clients.finetuning.conversation import Conversation, read_row
from envserver_clients.finetuning.data import rows_of

Form = Literal["contents", "messages"]

MOST_BYTES: Final = 1_000_000_000
"""Maximum size of a file."""
MOST_EXAMPLES: Final = 1_000_000
"""Maximum number of training examples."""
MOST_VALIDATION: Final = 5_000
BYTES_A_TOKEN: Final = 4
"""A rough estimate: only the service has its tokenizer."""
_SYSTEM: Final = ("system", "developer")


@dataclass
class RowCounts:
    """How many rows became examples, and why others were left out."""

    train: int = 0
    validation: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Prepared:
    """The files; `validation` is None if there are no rows for it."""

    train: Path
    validation: Path | None
    counts: RowCounts


def prepare(
    train: Sequence[Path],
    validation: Sequence[Path],
    folder: Path,
    form: Form,
    *,
    most_tokens: int,
    share: float = 0.0,
    seed: int = 0,
) -> Prepared:
    """Writes the files; each appears when it is complete.

    Args:
        most_tokens: maximum length of an example, input and output; rows that are likely longer
            are left out.
        share: fraction of `train` that becomes validation if `validation` is empty. The choice
            depends only on each row's content and the seed.

    Raises:
        InputError: a row has an unknown form, no row is left, or a limit is exceeded.
    """
    counts = RowCounts()
    files = {name: folder / f"{name}.jsonl" for name in ("train", "validation")}
    with ExitStack() as stack:
        partial = {
            name: stack.enter_context(replacing_path(path, sync=False))
            for name, path in files.items()
        }
        one = stack.enter_context(partial["train"].open("w"))
        other = stack.enter_context(partial["validation"].open("w"))
        for line in _lines(train, form, most_tokens, counts):
            aside = not validation and _is_aside(line, share, seed)
            _write(line, other if aside else one)
            counts.train += not aside
            counts.validation += aside
        for line in _lines(validation, form, most_tokens, counts):
            _write(line, other)
            counts.validation += 1
        one.flush()
        other.flush()
        _check(counts, partial)
    return Prepared(files["train"], files["validation"] if counts.validation else None, counts)


def line_of(row: dict[str, Any], place: str, form: Form, most_tokens: int) -> dict[str, Any] | str:
    """Returns a row in the service's form, or the reason to leave it out.
    Raises InputError: the row has an unknown form.
    """
    conversation = read_row(row, place)
    assert isinstance(conversation, Conversation)
    if conversation.tools or any(
        one["role"] == "tool" or one.get("tool_calls") for one in conversation.messages
    ):
        return "tools"
    turns: list[tuple[str, str]] = []
    for message in conversation.messages:
        text = message.get("content")
        if not isinstance(text, str):
            return "no text"
        _add(turns, "system" if message["role"] in _SYSTEM else message["role"], text)
    if sum(len(text.encode()) for _, text in turns) > most_tokens * BYTES_A_TOKEN:
        return "too long"
    return _formed(turns, form)


def _add(turns: list[tuple[str, str]], role: str, text: str) -> None:
    """Adds a message; adjacent messages of one role are joined, so that roles alternate."""
    if turns and turns[-1][0] == role:
        turns[-1] = (role, f"{turns[-1][1]}\n\n{text}")
    else:
        turns.append((role, text))


def _formed(turns: list[tuple[str, str]], form: Form) -> dict[str, Any] | str:
    system = turns.pop(0)[1] if turns and turns[0][0] == "system" else ""
    if not turns or turns[0][0] != "user" or turns[-1][0] != "assistant":
        return "does not begin with a user and end with the model"
    if any(role not in ("user", "assistant") for role, _ in turns):
        return "a system message in the middle"
    if any(not text.strip() for _, text in turns):
        return "an empty message"
    if form == "messages":
        said = [("system", system), *turns] if system else turns
        return {"messages": [{"role": role, "content": text} for role, text in said]}
    line: dict[str, Any] = {}
    if system:
        line["systemInstruction"] = {"role": "system", "parts": [{"text": system}]}
    names = {"user": "user", "assistant": "model"}
    line["contents"] = [{"role": names[role], "parts": [{"text": text}]} for role, text in turns]
    return line


def _lines(paths: Sequence[Path], form: Form, most_tokens: int, counts: RowCounts) -> Iterator[str]:
    for place, row in rows_of(paths):
        line = line_of(row, place, form, most_tokens)
        if isinstance(line, str):
            counts.dropped[line] += 1
        else:
            yield json.dumps(line, ensure_ascii=False)


def _is_aside(line: str, share: float, seed: int) -> bool:
    digest = hashlib.sha256(f"{seed}\n{line}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _write(line: str, file: TextIO) -> None:
    file.write(line + "\n")


def _check(counts: RowCounts, files: dict[str, Path]) -> None:
    dropped = ", ".join(f"{count} {reason}" for reason, count in counts.dropped.most_common())
    if not counts.train:
        raise InputError("No row is left to train on.", hint=f"Left out: {dropped or 'nothing'}.")
    for name, count, most in (
        ("train", counts.train, MOST_EXAMPLES),
        ("validation", counts.validation, MOST_VALIDATION),
    ):
        if count > most:
            raise InputError(f"{name}: {count:,} examples; the service accepts {most:,}.")
        if (size := files[name].stat().st_size) > MOST_BYTES:
            raise InputError(f"{name}: {size:,} bytes; the service accepts {MOST_BYTES:,}.")
