"""Converts programs with instructions (OpenCoder-LLM/opc-sft-stage2) to conversations.

Whether a program passes its tests is judged by the environment `code`, where rows are verified.
"""

from __future__ import annotations

from typing import Any

from .examples import Example

Json = dict[str, Any]

SYSTEM = "You are an expert programming assistant."
MAX_INSTRUCTION_CHARACTERS = 4000


def example_of(row: Json) -> Example | str:
    """Returns the example of `row`, or why it is dropped."""
    instruction, output = row.get("instruction"), row.get("output")
    if not isinstance(instruction, str) or not instruction.strip():
        return "no instruction"
    if len(instruction) > MAX_INSTRUCTION_CHARACTERS:
        return "instruction too long"
    if not isinstance(output, str) or not output.strip():
        return "no output"
    asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]
    return Example(asked, output, row, {})
