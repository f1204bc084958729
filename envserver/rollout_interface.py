"""What `rollout` gets as `run`, and what hooks, services and programs in place of the agent get.

Implementation: `workers.run`, `proxy.hooks`, `proxy.services`, `workers.harness`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from envserver_records.sandboxes import SandboxSpec
from envserver_records.tasks import Message, Task

from .sandbox_interface import BlockingSandbox, RunningProgram, Sandbox
from .tools.calling import LoopEnd, Tool
from .tools.sources import Tools


@dataclass(frozen=True)
class Caller:
    """The rollout on whose behalf a service is called.

    Args:
        group_id: the group whose rollouts are compared with this one.
        task: with its hidden part; the agent sees only what the service returns.
        flag: adds a flag to the trajectory, such as "web_leak_dropped".
        state: what `Services.state` made for this attempt; None without it.
    """

    rollout_id: str
    group_id: str
    task: Task
    flag: Callable[[str], object]
    state: Any = None


Service = Callable[[dict[str, Any], Caller], Awaitable[Any]]
"""Takes a JSON object and returns a JSON-like value. An InputError is shown to the agent. A
ServiceError, or any other exception, is the server's failure, and the rollout is retried; one plain
exception of Python that ends all first rollouts of a run is a bug, and ends the run."""


class Services(dict[str, Service]):
    """Services by name, with the state of each rollout, their counters and what they showed.

        def services(self):
            return nullcontext(Services({"guess": guess}, state=lambda task: Game(task.hidden)))

    Args:
        state: makes what one attempt at a task keeps on the server: a game, a simulated user. It is
            called at the attempt's first request to a service, which finds the state, as all later
            ones do, in `caller.state`. If it is an async context manager, it is entered then, left
            when the attempt has ended and none of its requests runs any more, and `caller.state` is
            what it returns. It must not block the server's event loop.
        counts: returns the number of requests since the start, by name, for `/metrics`.
        shown: returns what the rollouts of a group (by id) were shown, JSON-like. It is stored
            with the group so that a later run can be compared. Called once a group, at its end; may
            be async.
    """

    def __init__(
        self,
        services: Mapping[str, Service],
        *,
        state: Callable[[Task], Any] | None = None,
        counts: Callable[[], Mapping[str, float]] = dict,
        shown: Callable[[str], dict[str, Any] | Awaitable[dict[str, Any]]] = lambda group_id: {},
    ) -> None:
        super().__init__(services)
        self.state = state
        self.counts = counts
        self.shown = shown


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


MOST_REASON = 500
"""Maximum characters of a reason."""


class HookBug(Exception):
    """A hook in another process raised.

    Args:
        what: class, message and place; kind: the class; text: the traceback.
    """

    def __init__(self, what: str, kind: str, text: str) -> None:
        super().__init__(what)
        self.kind = kind
        self.text = text


class ModelCall:
    """A model call on its way to the engine, or an answer on its way back.

    `Environment.on_request` and `on_answer` get it:

        def on_request(self, call):
            if len(call.messages) > 40:
                call.change("compacted", messages=[call.messages[0], *call.messages[-20:]])

        async def on_answer(self, call):
            if call.caller.task.hidden["secret"] in str(call.answer.get("content")):
                call.refuse("The answer gives the secret away.")

    What it holds are copies: only `change` and `refuse` have an effect, the latest one of each.

    Args:
        caller: the rollout, with its task and its state.
        agent: name of the calling agent, None if there is only one.
        messages, tools: as the engine gets them, in OpenAI's chat format, whatever the dialect.
        prompt: of a text completion: a text, token ids, or a list of either; None in a chat.
        answer: the assistant message; None in `on_request`.
        choice: its index, if the agent asked for several.
    """

    def __init__(
        self,
        *,
        caller: Caller,
        agent: str | None,
        messages: list[Message],
        tools: list[dict[str, Any]],
        prompt: Any = None,
        answer: Message | None = None,
        choice: int = 0,
    ) -> None:
        self.caller = caller
        self.agent = agent
        self.messages = messages
        self.tools = tools
        self.prompt = prompt
        self.answer = answer
        self.choice = choice
        self.reason = ""
        """Why it was changed or refused; "" if it was not."""
        self.refused = False
        self.changes: dict[str, Any] = {}
        """The new values of what was changed, by name."""

    def change(
        self,
        reason: str,
        *,
        messages: list[Message] | None = None,
        tools: list[dict[str, Any]] | None = None,
        prompt: str | None = None,
        answer: Message | None = None,
    ) -> None:
        """Changes the request (`messages`, `tools`, `prompt`), or in `on_answer` the `answer`.

        Args:
            reason: recorded with the call; at most 500 characters count.

        Raises:
            TypeError: nothing is given, or what this hook cannot change.
        """
        given = {"messages": messages, "tools": tools, "prompt": prompt, "answer": answer}
        changes = {name: value for name, value in given.items() if value is not None}
        text = "messages" if self.prompt is None else "prompt"
        possible = {text, "tools"} if self.answer is None else {"answer"}
        if not changes or not changes.keys() <= possible:
            raise TypeError(f"change() takes one or more of {', '.join(sorted(possible))} here.")
        self.reason = _reason(reason)
        self.changes |= changes

    def refuse(self, reason: str) -> None:
        """Refuses the call: the agent gets an error with `reason` (LimitReached, "refused").

        An agent may catch it and go on; if it does not, the rollout is scored as it is.
        """
        self.reason = _reason(reason)
        self.refused = True


def _reason(reason: str) -> str:
    text = str(reason)[:MOST_REASON].strip()
    if not text:
        raise TypeError("A hook must say why it changes or refuses a call.")
    return text


FOREIGN_AGENT = "foreign_agent"
"""Flag of rollouts that another program played."""
OutputReader = Callable[[Sandbox, str], Awaitable[Any]]
"""Reads a rollout's output from the workspace and the program's last words."""


@dataclass(frozen=True, kw_only=True)
class HarnessTask:
    """What an external agent gets for one task (see `Environment.harness_task`).

    Args:
        instruction: what it is to do; its first message.
        archive: a tar file that is unpacked into its workspace, /work.
        files: more files of the workspace, by path.
        tools: offered to it by an MCP server, if it knows MCP; None: no tools of ours.
        skills: files of the skills that it may read, by path ("sorting/SKILL.md").
        output: reads the output once the program has ended; unset: its last words. The program
            shares the worker, so `score` must not trust what was computed in there
            (`result.flags` holds "foreign_agent").
    """

    instruction: str
    archive: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    tools: Tools | None = None
    skills: Mapping[str, str] = field(default_factory=dict)
    output: OutputReader | None = None


class HarnessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The external agent of a run.

    Args:
        name: a harness that we know, "command", or "url".
        version: of the installed program; "" if unknown.
        place: the folder of the installed program, as agents see it.
        command: the command line, for "command".
        url: its address, for "url".
        base_url: where it reaches the proxy, for "url"; "": at the proxy's own address.
        arguments: further arguments of its command line.
        output_bytes: how much of what it prints is kept.
    """

    name: str
    version: str = ""
    place: str = ""
    command: str = ""
    url: str = ""
    base_url: str = ""
    arguments: list[str] = []
    output_bytes: int = 64 * 1024

    def identity(self) -> dict[str, str]:
        """Returns what identifies it in records."""
        facts = {"name": self.name, "version": self.version, "command": self.command}
        facts |= {"url": self.url, "arguments": " ".join(self.arguments)}
        return {key: value for key, value in facts.items() if value}
