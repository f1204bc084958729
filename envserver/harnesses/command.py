"""Any program: `--agent.command "my-agent --task {instruction_file}"`."""

from __future__ import annotations

import shlex

from .launch import Harness, Launch, Session


def _launch(session: Session) -> Launch:
    values = {
        "{instruction_file}": str(session.instruction_file),
        "{instruction}": session.instruction,
        "{base_url}": session.base_url,
        "{api_key}": session.api_key,
        "{model}": session.model,
        "{mcp_url}": session.mcp_url,
        "{folder}": session.spec.place,
    }
    words = [*shlex.split(session.spec.command), *session.spec.arguments]
    return Launch(
        argv=[_filled(word, values) for word in words],
        env={
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_BASE": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "OPENAI_MODEL": session.model,
            "ANTHROPIC_BASE_URL": session.root_url,
            "ANTHROPIC_API_KEY": session.api_key,
            "ANTHROPIC_MODEL": session.model,
            **({"MCP_URL": session.mcp_url} if session.mcp_url else {}),
        },
    )


def _filled(word: str, values: dict[str, str]) -> str:
    # The instruction comes last: what it says must not be replaced.
    for name, value in values.items():
        if name != "{instruction}":
            word = word.replace(name, value)
    return word.replace("{instruction}", values["{instruction}"])


COMMAND = Harness(name="command", launch=_launch)
