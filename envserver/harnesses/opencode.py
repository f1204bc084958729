"""OpenCode, headless (npm `opencode-ai`): speaks OpenAI's chat completions."""

from __future__ import annotations

import json
from typing import Any

from .launch import Harness, Launch, Package, Session, skill_files

_CONTEXT = 131072
_OUTPUT = 8192
"""What it believes of the model; the proxy knows better, and says so when a context is full."""


def _launch(session: Session) -> Launch:
    model = f"env/{session.model}"
    limits = {"context": _CONTEXT, "output": _OUTPUT}
    config: dict[str, Any] = {
        "autoupdate": False,
        "share": "disabled",
        "model": model,
        "small_model": model,
        "agent": {"title": {"disable": True}},
        "permission": {"*": "allow"},
        "provider": {
            "env": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "env",
                "options": {"baseURL": session.base_url, "apiKey": session.api_key},
                "models": {session.model: {"name": session.model, "limit": limits}},
            }
        },
    }
    if session.mcp_url:
        config["mcp"] = {"env": {"type": "remote", "url": session.mcp_url, "oauth": False}}
    return Launch(
        argv=[
            f"{session.spec.place}/node_modules/.bin/opencode",
            *("run", "--format", "json", "--title", "task"),
            *session.spec.arguments,
            session.instruction,
        ],
        env={
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            # Both wait for ever where files cannot be watched.
            "OPENCODE_DISABLE_FFF": "1",
            "OPENCODE_EXPERIMENTAL_DISABLE_FILEWATCHER": "1",
        },
        files={
            ".config/opencode/opencode.json": json.dumps(config),
            **skill_files(session.skills, ".config/opencode/skills"),
        },
    )


OPENCODE = Harness(
    name="opencode",
    launch=_launch,
    package=Package(registry="npm", name="opencode-ai", version="1.18.33"),
)
