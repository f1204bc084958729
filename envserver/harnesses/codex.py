"""Codex, headless (npm `@openai/codex`): speaks OpenAI's responses."""

from __future__ import annotations

import json

from .launch import Harness, Launch, Package, Session, skill_files

_CONFIG = """\
model = {model}
model_provider = "env"
web_search = "disabled"
check_for_update_on_startup = false

[analytics]
enabled = false

[agents]
enabled = false

[model_providers.env]
name = "env"
base_url = {base_url}
env_key = "OPENAI_API_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
_MCP = """
[mcp_servers.env]
url = {url}
required = true
"""


def _launch(session: Session) -> Launch:
    # A JSON text is a TOML text.
    config = _CONFIG.format(model=json.dumps(session.model), base_url=json.dumps(session.base_url))
    if session.mcp_url:
        config += _MCP.format(url=json.dumps(session.mcp_url))
    argv = [
        f"{session.spec.place}/node_modules/.bin/codex",
        *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"),
        *session.spec.arguments,
        session.instruction,
    ]
    return Launch(
        argv=argv,
        env={"CODEX_HOME": str(session.home / ".codex"), "OPENAI_API_KEY": session.api_key},
        files={".codex/config.toml": config, **skill_files(session.skills, ".codex/skills")},
    )


CODEX = Harness(
    name="codex",
    launch=_launch,
    package=Package(registry="npm", name="@openai/codex", version="0.169.0"),
)
