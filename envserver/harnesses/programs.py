"""External agents: what each gets for a rollout (`Session`), and how it is started (`Launch`)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from ..rollout_interface import HarnessSpec

WORDS_FILE: Final = "words.txt"
"""File of HOME for a program's last words, if they are not the model's last message."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a program gets for one rollout.

    Args:
        home: its own HOME, empty.
        workspace: the folder that it works in; its current folder.
        base_url: of the proxy, with `/v1`; valid for this rollout, like `api_key`.
        instruction: what it is to do, also in `instruction_file`.
        mcp_url: of the MCP server with the environment's tools; "": none.
        context: tokens of a prompt and its answer at most; None: unknown.
        skills: files of skills by path.
    """

    spec: HarnessSpec
    home: Path
    workspace: Path
    base_url: str
    api_key: str
    model: str
    instruction: str
    instruction_file: Path
    mcp_url: str = ""
    context: int | None = None
    skills: Mapping[str, str] = field(default_factory=dict)

    @property
    def root_url(self) -> str:
        """The proxy's address without `/v1`, as Anthropic's clients want it."""
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A program to start.

    Args:
        argv: its command line; a program without a slash is looked for in PATH.
        env: variables besides PATH, HOME and the like.
        files: files of its HOME, by path.
        words_file: file of its HOME for its last words; without one they are the model's last
            message.
    """

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    words_file: str = ""


@dataclass(frozen=True, kw_only=True)
class Package:
    registry: Literal["npm", "pypi"]
    name: str
    version: str


@dataclass(frozen=True, kw_only=True)
class Harness:
    """An external agent. `package`: None for programs of the user."""

    name: str
    launch: Callable[[Session], Launch]
    package: Package | None = None


def skill_files(skills: Mapping[str, str], folder: str) -> dict[str, str]:
    return {f"{folder}/{path}": text for path, text in skills.items()}


def _launch_command(session: Session) -> Launch:
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


COMMAND = Harness(name="command", launch=_launch_command)


_TOOLS = "Bash,Read,Edit,Write"
_CLAUDES_WINDOW = 200_000
_FULL = 0.8
"""The part of a context at which programs compact: one more turn and the summary fit the rest."""


def _launch_claude_code(session: Session) -> Launch:
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
            **_claudes_window(session.context),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # else each prompt begins with other words
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "IS_SANDBOX": "1",
        },
        files=skill_files(session.skills, ".claude/skills"),
    )


def _claudes_window(context: int | None) -> dict[str, str]:
    """Has it compact before the context is full: it takes unknown models for one of 200,000 tokens,
    and compacts at a share of these."""
    share = min(1.0, (context or _CLAUDES_WINDOW) / _CLAUDES_WINDOW)
    return {"CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": f"{100 * _FULL * share:.2f}"}


CLAUDE_CODE = Harness(
    name="claude-code",
    launch=_launch_claude_code,
    package=Package(registry="npm", name="@anthropic-ai/claude-code", version="2.1.197"),
)


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


def _launch_codex(session: Session) -> Launch:
    # A JSON text is a TOML text.
    config = _CONFIG.format(model=json.dumps(session.model), base_url=json.dumps(session.base_url))
    if session.context is not None:
        full = int(_FULL * session.context)
        limits = (
            f"model_context_window = {session.context}\nmodel_auto_compact_token_limit = {full}\n"
        )
        config = limits + config
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
    launch=_launch_codex,
    package=Package(registry="npm", name="@openai/codex", version="0.169.0"),
)


_CONTEXT = 131072
_OUTPUT = 8192
"""What it believes of a model whose context is unknown, and of its answers."""


def _launch_opencode(session: Session) -> Launch:
    model = f"env/{session.model}"
    context = session.context or _CONTEXT
    limits = {"context": context, "output": min(_OUTPUT, int((1 - _FULL) * context))}
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
    launch=_launch_opencode,
    package=Package(registry="npm", name="opencode-ai", version="1.18.33"),
)


# Its model is asked once for each step: by itself it asks ten times, with pauses of up to a minute.

_MINI_PROGRAM = """\
import json, sys
from pathlib import Path

import yaml
from minisweagent.agents.default import AgentConfig, DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

about = json.loads(Path(sys.argv[1]).read_text())
config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
model = config.get("model") or {}
model["model_kwargs"] = {**(model.get("model_kwargs") or {}), **about["model_kwargs"]}
model |= {"model_name": about["model"], "cost_tracking": "ignore_errors"}
environment = (config.get("environment") or {}) | {"cwd": about["workspace"]}
environment.pop("environment_class", None)
agent = {
    key: value for key, value in (config.get("agent") or {}).items()
    if key in AgentConfig.model_fields
}
agent |= {"step_limit": 0, "cost_limit": 0}
done = DefaultAgent(LitellmModel(**model), LocalEnvironment(**environment), **agent).run(
    about["instruction"]
)
print(json.dumps(done, default=str))
Path(about["words_file"]).write_text(done.get("submission") or "")
"""


def _launch_mini_swe_agent(session: Session) -> Launch:
    about = {
        "model": f"openai/{session.model}",
        "model_kwargs": {
            "api_base": session.base_url,
            "api_key": session.api_key,
            "num_retries": 0,
            "max_retries": 0,
        },
        "workspace": str(session.workspace),
        "instruction": session.instruction,
        "words_file": str(session.home / WORDS_FILE),
    }
    return Launch(
        argv=[
            f"{session.spec.place}/bin/python",
            *("-P", str(session.home / "mini.py"), str(session.home / "mini.json")),
            *session.spec.arguments,
        ],
        env={
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_GLOBAL_CONFIG_DIR": str(session.home / ".mini"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        files={"mini.py": _MINI_PROGRAM, "mini.json": json.dumps(about)},
        words_file=WORDS_FILE,
    )


MINI_SWE_AGENT = Harness(
    name="mini-swe-agent",
    launch=_launch_mini_swe_agent,
    package=Package(registry="pypi", name="mini-swe-agent", version="2.4.6"),
)


# Its memory rewrites turns of the model before it sends them again. Here each is sent back as it
# was sampled, and nothing stops the model at `</code>`, so that a conversation is one training row.

_SMOL_PROGRAM = '''\
import json, subprocess, sys
from pathlib import Path

from openai import OpenAI
from smolagents import ChatMessage, CodeAgent, Model, tool
from smolagents.models import MessageRole

about = json.loads(Path(sys.argv[1]).read_text())
client = OpenAI(base_url=about["base_url"], api_key=about["api_key"], max_retries=0)


def text_of(message):
    content = message.content or ""
    return content if isinstance(content, str) else "\\n".join(
        part["text"] for part in content if part["type"] == "text"
    )


class AsSampled(Model):
    def __init__(self):
        super().__init__(model_id=about["model"])
        self.turns = []

    def generate(self, messages, **options):
        turns, wire = iter(self.turns), []
        for message in messages:
            if message.role == MessageRole.TOOL_CALL:  # repeats what the turn says
                continue
            if message.role == MessageRole.ASSISTANT:
                wire.append(next(turns))
                continue
            role = "system" if message.role == MessageRole.SYSTEM else "user"
            if wire and wire[-1]["role"] == role:
                wire[-1]["content"] += "\\n\\n" + text_of(message)
            else:
                wire.append({"role": role, "content": text_of(message)})
        said = client.chat.completions.create(model=self.model_id, messages=wire)
        turn = said.choices[0].message.model_dump(exclude_none=True)
        self.turns.append(turn)
        return ChatMessage(role=MessageRole.ASSISTANT, content=turn.get("content") or " ")


@tool
def bash(command: str) -> str:
    """Runs a command with bash in the working directory and returns what it prints.

    Args:
        command: The command.
    """
    done = subprocess.run(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    )
    return done.stdout if done.returncode == 0 else f"{done.stdout}\\nexit status {done.returncode}"


agent = CodeAgent(
    tools=[bash], model=AsSampled(), max_steps=10_000,
    executor_kwargs={"timeout_seconds": None},  # the rollout's time bounds it
)
Path(about["words_file"]).write_text(str(agent.run(about["instruction"])))
'''


def _launch_smolagents(session: Session) -> Launch:
    home = session.home
    about = {
        "base_url": session.base_url,
        "api_key": session.api_key,
        "model": session.model,
        "instruction": session.instruction,
        "words_file": str(home / WORDS_FILE),
    }
    return Launch(
        argv=[
            f"{session.spec.place}/bin/python",
            *("-P", str(home / "smol.py"), str(home / "smol.json")),
            *session.spec.arguments,
        ],
        files={"smol.py": _SMOL_PROGRAM, "smol.json": json.dumps(about)},
        words_file=WORDS_FILE,
    )


SMOLAGENTS = Harness(
    name="smolagents",
    launch=_launch_smolagents,
    package=Package(registry="pypi", name="smolagents[openai]", version="1.26.0"),
)
