"""Every way envserver can fail: what happened, who is to blame, what happens to the rollout.

    EnvserverError
    ├── UsageError             the caller's fault; nothing was changed            HTTP 4xx, exit 2
    │   ├── ConfigError        a setting is unknown, ill-typed or contradictory
    │   ├── InputError         a request or file is not usable (the message names the place)
    │   ├── TooLargeError      a body, a decompressed body or a nesting exceeds its limit
    │   ├── TemplateRefused    the chat template rejects the conversation
    │   ├── NotFoundError      no such environment, run, lease, group, key
    │   └── ConflictError      the object is in a state that forbids this
    ├── RolloutError           a rollout ended without a result
    │   ├── LimitReached       the model's fault: turns, tokens, time, context    scored as it is
    │   ├── AgentError         the environment's code raised                      retry, then drop
    │   ├── WorkerError        the process that ran the agent is gone
    │   │   ├── WorkerDied     it exited, was killed, ran out of memory           retry, then drop
    │   │   ├── WorkerHung     no heartbeat, or past its deadline                 retry, then drop
    │   │   └── WorkerGarbage  it violated the protocol                           retry, then drop
    │   ├── EngineError        the model server failed
    │   │   ├── EngineUnavailable  no replica answers                             retry, then drop
    │   │   ├── EngineTimeout  no answer within the call's timeout                retry, then drop
    │   │   ├── EngineRefused  it rejected the request (HTTP 4xx)                 drop at once
    │   │   └── EngineGarbage  its answer violates the protocol                   retry, then drop
    │   ├── SandboxError       the sandbox of the model's programs failed         retry, then drop
    │   │   ├── SandboxUnavailable it cannot be made (space, backend, supervisor) retry, then drop
    │   │   │   └── SandboxImageMissing the engine lacks the task's image         drop at once
    │   │   └── SandboxLost    it ended during a program, not because of it       retry, then drop
    │   ├── ServiceError       a service of the environment failed                retry, then drop
    │   │   └── HookError      a hook of the environment raised                   drop at once
    │   ├── ScorerError        scoring raised, died or timed out                  retry, then drop
    │   │   └── RewardError    a reward is out of range, or for no agent or turn  drop at once
    │   ├── JudgeError         the judge that scoring asked gave no usable answer retry, then drop
    │   ├── Unscorable         the score has no reward                            drop
    │   ├── Straggler          its group's time ended first                       drop
    │   ├── Stale              the policy moved too far since its first token     drop
    │   └── TokensError        the recorded tokens break an invariant             never delivered
    ├── StoreError             the durable store failed; retrying is safe         HTTP 503
    │   ├── StoreFull          no space left                                      HTTP 507
    │   └── StoreLost          another process owns it, or it is gone; the server stops
    ├── TooMuchUntrained       flags keep too many tokens from training; stopped  exit 1
    └── AllFailed              every rollout failed; the run stopped              exit 1

An infrastructure failure is never a reward of 0: only scored rollouts reach a trainer. If code of
the model ended its worker (isolation "sandboxed"), that is a limit of the model, not a failure of
the infrastructure: see `policy.limit_of_death`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec


class Blame(enum.StrEnum):
    """The party at fault for a failure."""

    MODEL = "model"
    ENVIRONMENT = "environment"
    ENGINE = "engine"
    SERVER = "server"
    USER = "user"


class Outcome(enum.StrEnum):
    """The consequence of a failed rollout."""

    SCORE = "score"
    RETRY = "retry"
    DROP = "drop"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A failure as data, to store, send and count. `kind` is the error class in snake_case."""

    kind: str
    blame: Blame
    outcome: Outcome
    message: str
    hint: str = ""
    detail: dict[str, Any] = {}


class EnvserverError(Exception):
    """Base class. `message` says what happened, `hint` what to do, `detail` holds small facts."""

    kind = "error"
    blame = Blame.SERVER
    outcome = Outcome.DROP
    status = 500

    def __init__(self, message: str, *, hint: str = "", **detail: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message

    def failure(self) -> Failure:
        return Failure(
            kind=self.kind,
            blame=self.blame,
            outcome=self.outcome,
            message=self.message,
            hint=self.hint,
            detail=self.detail,
        )


class UsageError(EnvserverError):
    kind, blame, status = "usage", Blame.USER, 400


class ConfigError(UsageError):
    kind = "config"


class InputError(UsageError):
    """`detail["place"]` names the place: a line number, a JSON path or a field."""

    kind, status = "input", 422


class TooLargeError(UsageError):
    kind, status = "too_large", 413


class TemplateRefused(UsageError):
    """The message contains the chat template's own message."""

    kind = "template_refused"


class NotFoundError(UsageError):
    kind, status = "not_found", 404


class ConflictError(UsageError):
    kind, status = "conflict", 409


class RolloutError(EnvserverError):
    """Ends an attempt. `messages`: its main agent's conversation until then; `turns`, `tokens`: its
    calls, and what they sampled."""

    kind = "rollout"
    messages: Sequence[dict[str, Any]] = ()
    turns = tokens = 0


class LimitReached(RolloutError):
    """`detail["limit"]` is turns, tokens, time, context (the model's window is full), record (its
    requests hold too much memory) or refused (by a hook of the environment).

    An agent that has limits of its own raises it; `detail["output"]` is then what is scored as
    `Result.output`."""

    kind, blame, outcome, status = "limit_reached", Blame.MODEL, Outcome.SCORE, 429


class AgentError(RolloutError):
    """`detail["output"]`, if an agent sets it, is scored if a limit turns out to be the cause."""

    kind, blame, outcome = "agent_error", Blame.ENVIRONMENT, Outcome.RETRY


class WorkerError(RolloutError):
    kind, outcome = "worker_error", Outcome.RETRY


class WorkerDied(WorkerError):
    kind = "worker_died"


class WorkerHung(WorkerError):
    kind, blame = "worker_hung", Blame.ENVIRONMENT


class WorkerGarbage(WorkerError):
    kind = "worker_garbage"


class EngineError(RolloutError):
    kind, blame, outcome, status = "engine_error", Blame.ENGINE, Outcome.RETRY, 502


class EngineUnavailable(EngineError):
    kind, status = "engine_unavailable", 503


class EngineTimeout(EngineError):
    kind, status = "engine_timeout", 504


class EngineRefused(EngineError):
    """`detail["status"]` is the engine's HTTP status; the message contains its text."""

    kind, outcome, status = "engine_refused", Outcome.DROP, 400


class EngineGarbage(EngineError):
    kind = "engine_garbage"


class SandboxError(RolloutError):
    kind, outcome, status = "sandbox_error", Outcome.RETRY, 502


class SandboxUnavailable(SandboxError):
    kind, status = "sandbox_unavailable", 503


class SandboxImageMissing(SandboxUnavailable):
    """`detail["missing"]` names the image, which no retry brings."""

    kind, blame, outcome = "sandbox_image_missing", Blame.USER, Outcome.DROP


class SandboxLost(SandboxError):
    kind = "sandbox_lost"


class ServiceError(RolloutError):
    kind, blame, outcome, status = "service_error", Blame.ENVIRONMENT, Outcome.RETRY, 502


class HookError(ServiceError):
    """`on_request` or `on_answer` of the environment is wrong; `detail["bug"]` says where."""

    kind, outcome, status = "hook_error", Outcome.DROP, 500


class ScorerError(RolloutError):
    kind, blame, outcome = "scorer_error", Blame.ENVIRONMENT, Outcome.RETRY


class RewardError(ScorerError):
    """The environment gave a reward that is not allowed; `detail["bug"]` says which."""

    kind, outcome = "reward_error", Outcome.DROP


class JudgeError(RolloutError):
    kind, blame, outcome, status = "judge_error", Blame.ENGINE, Outcome.RETRY, 502


class Unscorable(RolloutError):
    kind, blame = "unscorable", Blame.ENVIRONMENT


class Straggler(RolloutError):
    kind, blame = "straggler", Blame.ENVIRONMENT


class Stale(RolloutError):
    """`detail["oldest"]` is the version of its first token, `detail["version"]` the current one."""

    kind = "stale"


class TokensError(RolloutError):
    kind, blame, outcome = "tokens_error", Blame.SERVER, Outcome.DROP


class StoreError(EnvserverError):
    kind, status = "store_error", 503


class StoreFull(StoreError):
    kind, status = "store_full", 507


class StoreLost(StoreError):
    kind = "store_lost"


class TooMuchUntrained(EnvserverError):
    kind = "too_much_untrained"


class AllFailed(EnvserverError):
    kind = "all_failed"


R = TypeVar("R", bound=EnvserverError)


def by_kind(*bases: type[R]) -> dict[str, type[R]]:
    """Returns `bases` and all below them by `kind`; of classes with one kind the highest counts."""
    below = [kind for base in bases for kind in base.__subclasses__()]
    return (by_kind(*below) if below else {}) | {base.kind: base for base in bases}


Fault = Literal["model", "environment", "engine", "trainer", "infrastructure"]
"""The party at fault for a failed attempt, as the API's answers name it."""


def fault_of(kind: str, blame: Blame) -> Fault:
    # It was not too slow by itself: the trainer went on.
    return "trainer" if kind == Stale.kind else _FAULTS[blame]


_FAULTS: Final[dict[Blame, Fault]] = {
    Blame.MODEL: "model",
    Blame.ENVIRONMENT: "environment",
    Blame.ENGINE: "engine",
    Blame.SERVER: "infrastructure",
    Blame.USER: "environment",
}
