"""The interface that `rollout` gets as `run`: the model, tools, sandboxes, remaining budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol

import msgspec
from envserver_records.sandboxes import SandboxSpec
from envserver_records.tasks import Message

from .sandbox_interface import BlockingSandbox, RunningProgram, Sandbox
from .service_interface import Caller as Caller
from .service_interface import Service as Service
from .service_interface import Services as Services
from .tools.calling import LoopEnd, Tool
from .tools.sources import Tools


class Reply(msgspec.Struct, frozen=True):
    """The model's answer to one `chat` call.

    Args:
        content: the text ("" if the model only called tools).
        tool_calls: in OpenAI's format: `{"id", "type", "function": {"name", "arguments": "JSON"}}`.
        finish_reason: "stop", "tool_calls" or "length".
        message: the whole assistant message; append it to the history unchanged.
    """

    content: str
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    message: Message


class Rollout(Protocol):
    """The argument `run` of `rollout`: access to the model and the remaining budget.

    Any agent framework works if it is given `base_url`, `api_key` and `model`; its tokens are
    recorded. All three are valid for this attempt only.
    """

    rollout_id: str
    attempt: int
    base_url: str
    """URL of an OpenAI-compatible endpoint, with its `/v1`."""
    api_key: str
    model: str
    deadline: float
    """`time.time()` at which the rollout is stopped."""
    max_turns: int

    @property
    def seconds_left(self) -> float: ...

    @property
    def client(self) -> Any:
        """A ready `openai.AsyncOpenAI`."""

    @property
    def blocking_client(self) -> Any:
        """A ready `openai.OpenAI`, for a plain `def rollout` (which runs in a thread)."""

    async def chat(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        agent: str | None = None,
        **sampling: Any,
    ) -> Reply:
        """Requests one chat completion.

        Args:
            messages: the history, in OpenAI's format.
            tools: OpenAI function tools.
            agent: name of the calling agent in a multi-agent rollout.
            sampling: `max_tokens`, `stop`, `tool_choice` ... (the run sets temperature and top_p;
                fields such as `logit_bias` need its setting `tokens.constraints`).

        Raises:
            LimitReached: turns, tokens or time are used up. Do not catch it: the rollout is scored.
            EngineError: the engine failed. Do not catch it: the rollout is retried.
        """

    def chat_blocking(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        agent: str | None = None,
        **sampling: Any,
    ) -> Reply:
        """`chat` for a plain `def rollout`."""

    async def loop(
        self,
        messages: list[Message],
        *,
        tools: Tools | None = None,
        final: str | None = None,
        max_turns: int | None = None,
        max_tool_errors: int = 10,
        **options: Any,
    ) -> LoopEnd:
        """Chats and runs the model's tool calls until it answers without one: a whole agent.

        Args:
            messages: the conversation; replies and tool results are appended to it.
            tools: tools, typed functions (see `tool`), MCP servers; unset: `Environment.tools`.
            final: name of the tool whose valid call ends the loop, such as "submit".
            max_turns: maximum number of the model's messages; the rollout's own limit applies, too.
            max_tool_errors: calls that fail before the loop ends.
            options: `agent` and sampling as in `chat`; the hooks of
                `envserver.tools.loop.chat_with_tools`.

        Raises:
            LimitReached, EngineError: as `chat`.
            AgentError: a tool raised something else than a ToolError: a bug of the environment.
        """

    def loop_blocking(
        self, messages: list[Message], *, tools: Tools | None = None, **options: Any
    ) -> LoopEnd:
        """`loop` for a plain `def rollout`."""

    def open_tools(
        self, tools: Tools | None = None
    ) -> AbstractAsyncContextManager[Mapping[str, Tool]]:
        """Opens tools by name for a loop of your own, or for several loops: MCP servers run, and
        tools on the server can be called, until the end of the block.

        Args:
            tools: as in `loop`.
        """

    def serve_mcp(self, tools: Tools | None = None) -> AbstractAsyncContextManager[str]:
        """Offers tools to an agent that speaks only MCP: yields the address of a server over
        streamable HTTP, with a secret path (extra `mcp`).

        A failure that is not the model's ends the rollout at the end of the block, whatever the
        agent made of it.

        Args:
            tools: as in `loop`.
        """

    def base_url_of(self, agent: str) -> str:
        """Returns the `base_url` of one of several agents; calls are recorded under its name."""

    def open_sandbox(self, spec: SandboxSpec | None = None) -> AbstractAsyncContextManager[Sandbox]:
        """Opens a sandbox on the server for the model's programs; its usage is in the trajectory.

        Args:
            spec: unset: `Environment.sandbox`. Limits are cut down to those of that spec, and only
                modules that it lists can be preloaded.

        Raises:
            SandboxError: no sandbox can be made, or the environment declares none.
        """

    def open_sandbox_blocking(
        self, spec: SandboxSpec | None = None
    ) -> AbstractContextManager[BlockingSandbox]:
        """`open_sandbox` for a plain `def rollout`."""

    def open_program(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        spec: SandboxSpec | None = None,
    ) -> AbstractAsyncContextManager[RunningProgram]:
        """Starts a program in a sandbox of its own, to talk to it over its standard input and
        output; it is killed at the end of the block. Not with the backend docker.

        Args:
            argv, env: as in `Sandbox.exec`.
            spec: as in `open_sandbox`. Its limits apply, but for `wall_seconds`: the program may
                run until the end of the rollout.

        Raises:
            SandboxError: as in `open_sandbox`.
        """

    @property
    def egress_url(self) -> str:
        """URL of the HTTP proxy to the hosts of `Environment.egress`, with this attempt's key.

        Processes of one rollout (isolation "dedicated" and "sandboxed") have it in HTTP_PROXY and
        HTTPS_PROXY, which most HTTP clients read. Programs in `open_sandbox` have a proxy of their
        own there, which needs no key.
        """

    @property
    def tools_url(self) -> str:
        """URL below which the environment's services answer `POST {name}` with JSON."""

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        """Calls a service of the environment (`Environment.services`) and returns its answer.

        Raises:
            InputError: the service rejects these arguments or does not exist.
            LimitReached: time or calls are used up. Do not catch it: the rollout is scored.
            ServiceError: the service failed. Do not catch it: the rollout is retried.
        """

    def call_tool_blocking(self, name: str, arguments: dict[str, Any]) -> Any:
        """`call_tool` for a plain `def rollout`."""

    def reward(self, value: float, *, turn: int | None = None, agent: str | None = None) -> None:
        """Rewards one turn of an agent, in addition to what `score` gives at the end.

        The rewards of a turn add up; an agent's reward is its outcome (from `score`, 0.0 if turns
        are all that counts) plus those of its turns. Trainers may learn from each turn's own
        return. Not available with the isolation "sandboxed", where code of the model could call it:
        use `Score(turns=...)` there.

        Args:
            value: any finite number.
            turn: number of the turn, from 0, among the calls that the agent received an answer to;
                unset: its latest call.
            agent: name of one of several agents; unset: the main agent.
        """

    def log(self, event: str, **facts: Any) -> None:
        """Writes a line to the server's log, with the id of this rollout."""

    def log_metric(self, name: str, value: float) -> None:
        """Stores a number with the trajectory; the last value of a name counts.

        At most 200 names of at most 100 printable characters; others are left out, and the
        rollout has the flag `metrics_left_out`.
        """

    def log_action(
        self, tool: str, input: Any = None, output: Any = None, *, error: str = ""
    ) -> None:
        """Records one step for readers and for data: the tool, its input and its output.

        Steps are kept in order (`result.actions`, the unified trajectory), also if the rollout is
        cut off. Input and output are JSON-like. Very long values and steps after the first few
        thousand are truncated and marked. Rewards must not depend on steps: the agent's process
        writes them.

        Args:
            error: why the step failed or was refused, which is no output: no training row is made
                of such a step.
        """
