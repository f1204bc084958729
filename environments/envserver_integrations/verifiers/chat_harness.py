"""verifiers' chat loop, run in the worker's own process. Its harness `null` is this loop, as a
program for which uv fetches packages. Programs of reward functions run with this interpreter, too:
nothing is fetched while a rollout runs."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import openai
import openai.resources
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness, NullHarnessConfig
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes import ProgramResult, Runtime

from .common import TLS_CONTEXT

__all__ = ["ChatHarness"]

HARNESS_ID = "envserver_chat"
_PROGRAM = compile(CHAT_PROGRAM_SOURCE, "verifiers_chat_program", "exec")


class ChatHarnessConfig(NullHarnessConfig):  # type: ignore[misc]
    """Settings of `null`."""


class ChatHarness(NullHarness):  # type: ignore[misc]
    """`null` in this process: a chat with the task's tools and no others."""

    def __init__(self, config: ChatHarnessConfig) -> None:
        super().__init__(config)

    async def setup(self, runtime: Any) -> None:
        """Prepares nothing."""

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        arguments = argparse.Namespace(
            base_url=endpoint,
            api_key=secret,
            model=ctx.model,
            system_prompt=system or "",
            prompt=prompt if isinstance(prompt, str) else "",
            initial_messages_file="",
            mcp_config=json.dumps({"mcpServers": self._servers(mcp_urls)}) if mcp_urls else "",
            tool_interception_url=tool_interception_url or "",
            bash=False,
            compaction=False,
            summarize_at_tokens=None,
            edit=False,
            search=False,
            serper_key="",
        )
        if prompt is not None and not isinstance(prompt, str):
            path = Path(runtime.workdir) / f"messages-{trace.id}.json"
            path.write_text(json.dumps([message_to_wire(message) for message in prompt]))
            arguments.initial_messages_file = str(path)
        program: dict[str, Any] = {"__name__": "verifiers_chat_program"}
        exec(_PROGRAM, program)
        program["parse_args"] = lambda: arguments
        program["DefaultAsyncHttpxClient"] = _http_client
        try:
            await program["main"]()
        except SystemExit as error:  # its way to say that the connection broke
            return ProgramResult(exit_code=int(error.code or 0), stdout="", stderr="")
        except Exception:  # noqa: BLE001 - as the end of a program
            return ProgramResult(exit_code=1, stdout="", stderr=traceback.format_exc())
        return ProgramResult(exit_code=0, stdout="", stderr="")

    def _servers(self, urls: dict[str, str]) -> dict[str, Any]:
        timeout = self.config.tool_timeout
        return {name: {"url": url, "timeout": timeout} for name, url in urls.items()}


def _http_client(verify: str) -> Any:
    return openai.DefaultAsyncHttpxClient(verify=TLS_CONTEXT, trust_env=False)


def register() -> None:
    """Makes the harness known to verifiers by HARNESS_ID, and keeps uv from being called."""
    sys.modules[HARNESS_ID] = sys.modules[__name__]
    Runtime.prepare_uv_script = _with_this_interpreter


async def _with_this_interpreter(
    runtime: Any, script: str | bytes, env: Any = None, *, activate: bool = True
) -> list[str]:
    data = script.encode() if isinstance(script, str) else script
    path = f"{runtime.scripts_dir}/{hashlib.sha256(data).hexdigest()}.py"
    await runtime.write(path, data)
    return [sys.executable, path]
