"""Claude Code, headless (npm `@anthropic-ai/claude-code`): speaks Anthropic's messages."""

from __future__ import annotations

import json

from .launch import Harness, Launch, Package, Session, skill_files

_TOOLS = "Bash,Read,Edit,Write"


def _launch(session: Session) -> Launch:
    argv = [
        f"{session.spec.place}/node_modules/.bin/claude",
        *("-p", session.instruction, "--output-format", "json", "--dangerously-skip-permissions"),
        "--strict-mcp-config",
    ]
    if session.skills:
        argv += ["--tools", f"{_TOOLS},Skill"]
    else:
        argv += ["--bare", "--tools", _TOOLS]  # bare: no plugins, no memory, a short prompt
    if session.mcp_url:
        servers = {"mcpServers": {"env": {"type": "http", "url": session.mcp_url}}}
        argv += ["--mcp-config", json.dumps(servers)]
    return Launch(
        argv=[*argv, *session.spec.arguments],
        env={
            "ANTHROPIC_BASE_URL": session.root_url,
            "ANTHROPIC_API_KEY": session.api_key,
            "ANTHROPIC_MODEL": session.model,
            "ANTHROPIC_SMALL_FAST_MODEL": session.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # else each prompt begins with other words
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "IS_SANDBOX": "1",
        },
        files=skill_files(session.skills, ".claude/skills"),
    )


CLAUDE_CODE = Harness(
    name="claude-code",
    launch=_launch,
    package=Package(registry="npm", name="@anthropic-ai/claude-code", version="2.1.197"),
)
