"""The world of one episode: both sides' tools over their data. A model's call never raises: an
error becomes the result's text, "Error: ..." in the words of tau2-bench."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from envserver_records.tasks import Json
from pydantic import BaseModel

from .database import Base, Database
from .toolkit import Requestor, ToolInfo, Toolkit, result_text


@dataclass(frozen=True)
class Side:
    """The tools of one side and what their data look like."""

    toolkit: type[Toolkit]
    model: type[BaseModel]
    keyed: tuple[str, ...]  # see `Base`
    file: str = "db"  # without extension: `db` is db.json, db.json.gz or db.toml


@dataclass(frozen=True)
class DomainKind:
    """The fixed part of a domain."""

    name: str
    agent: Side  # the assistant's side
    user: Side | None = None  # the customer's, if it has tools
    sync: Callable[[Any, Any], None] | None = None
    policy_file: str = "policy.md"
    policy_parts: tuple[tuple[str, str], ...] = ()
    folder: str = ""  # among tau2-bench's domains; empty: its name


@dataclass(frozen=True)
class Domain:
    """A domain with its data; shared by all episodes."""

    kind: DomainKind
    agent_base: Base
    user_base: Base | None
    policy: str
    tasks: Mapping[str, Json] = field(default_factory=dict)
    splits: Mapping[str, list[str]] = field(default_factory=dict)  # ids of the tasks of each split

    @property
    def name(self) -> str:
        return self.kind.name

    def world(self) -> World:
        return World(self)


@dataclass(frozen=True)
class CallResult:
    content: str
    error: bool


class World:
    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        kind = domain.kind
        self.agent = kind.agent.toolkit(Database(domain.agent_base))
        self.user: Toolkit | None = None
        if kind.user is not None and domain.user_base is not None:
            self.user = kind.user.toolkit(Database(domain.user_base))
        self.sync()

    def call(self, requestor: Requestor, name: str, arguments: Json) -> CallResult:
        """Runs a model's call; arguments that are not an object are an error, too."""
        if not isinstance(arguments, Mapping):
            return CallResult("Error: The arguments are not a JSON object.", error=True)
        try:
            result = self.act(requestor, name, arguments)
            self.sync()
        except Exception as error:  # noqa: BLE001  (whatever a tool raises is for the model)
            return CallResult(f"Error: {error}", error=True)
        return CallResult(result_text(result), error=False)

    def act(self, requestor: Requestor, name: str, arguments: Json) -> Any:
        """Calls a tool without the sync that follows a model's call."""
        for reserved in ("self", "tool_name", "requestor"):
            if reserved in arguments:
                raise TypeError(_RESERVED[reserved])
        if requestor == "user" and self.user is None:
            raise ValueError("User tools not available")
        return self._side(requestor).use(name, arguments)

    def run_function(self, env_type: Requestor, name: str, arguments: Json) -> Any:
        """Runs any function of a toolkit: a step of the set-up, or an assertion."""
        function = getattr(self._side(env_type), name)
        result = function(**arguments)
        self.sync()
        return result

    def sync(self) -> None:
        if self.domain.kind.sync is not None:
            self.domain.kind.sync(self.agent, self.user)

    def tool(self, name: str) -> ToolInfo | None:
        """The tool `name` of either side; the assistant's goes first."""
        for toolkit in (self.agent, self.user):
            if toolkit is not None and name in toolkit.tools():
                return toolkit.tools()[name]
        return None

    def merge_data(self, agent: Json | None, user: Json | None) -> None:
        """As in tau2-bench, where both sides have data, the one that is given then serves both
        sides."""
        if agent is not None:
            self.agent.db.merge(agent)
            if self.user is not None:
                self.user.db = self.agent.db
        if user is not None and self.user is not None:
            self.user.db.merge(user)
            self.agent.db = self.user.db

    def agent_hash(self) -> str:
        return self.agent.db.hash()

    def user_hash(self) -> str | None:
        return None if self.user is None else self.user.db.hash()

    def same_as(self, other: World) -> bool:
        if not self.agent.db.same_as(other.agent.db):
            return False
        if self.user is None or other.user is None:
            return self.user is other.user
        return self.user.db.same_as(other.user.db)

    def _side(self, requestor: Requestor) -> Any:
        match requestor:
            case "assistant":
                return self.agent
            case "user":
                return self.user
        raise ValueError(f"Invalid requestor: {requestor}")


_RESERVED = {
    "self": "Environment.make_tool_call() got multiple values for argument 'self'",
    "tool_name": "Environment.make_tool_call() got multiple values for argument 'tool_name'",
    "requestor": "tau2.environment.environment.Environment.make_tool_call() "
    "got multiple values for keyword argument 'requestor'",
}
"""tau2-bench's answers to arguments named like those of its own function."""
