"""Messages of demonstrations, as a model would write them. Pure."""

from __future__ import annotations

import json
from typing import Any

from envserver import Message


def text_message(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call_message(tool: str, text: str = "", /, **arguments: Any) -> Message:
    function = {"name": tool, "arguments": json.dumps(arguments, ensure_ascii=False)}
    call = {"id": f"call_{tool}", "type": "function", "function": function}
    return {"role": "assistant", "content": text, "tool_calls": [call]}
