"""The environment `swe` with sandboxes, and agents of it that follow a script."""

from pathlib import Path
from typing import Any

from envserver_environments.swe.agent import AgentKind, AgentOptions, solve
from envserver_environments.swe.env import Swe
from envserver_environments.swe.known import result_of
from envserver_environments.swe.sample import SampleTask, sample_tasks

from envserver import PublicTask, Sandboxes, Task
from support.scripted_run import ScriptedRun, says


def own(name: str) -> SampleTask:
    return next(task for task in sample_tasks() if task.name == name)


ROMAN = own("roman-subtractive")


def swe_of(rooms: Sandboxes | None, rows: Path | None = None, **config: Any) -> Swe:
    """Returns an instance that runs programs in `rooms`, with the tasks of a file or a folder."""
    if rows is not None:
        config |= {"data_set": "swe_bench", "data_path": rows}
    swe = Swe(Swe.Config(**config))
    if rooms is not None:
        swe.sandboxes = rooms
    return swe


async def rewards(swe: Swe, task: Task, *patches: str) -> list[float | None]:
    return [(await swe.score(task, result_of(patch))).reward for patch in patches]


async def attempt(
    rooms: Sandboxes, kind: AgentKind, *script: Any, **public: Any
) -> tuple[dict[str, Any], ScriptedRun]:
    """An attempt of twelve turns; at the end of the script the model repeats its last words."""
    turns = [says(one) if isinstance(one, str) else one for one in script]
    run = ScriptedRun([*turns, *turns[-1:] * (12 - len(turns))], max_turns=12, rooms=rooms)
    task = PublicTask("t", public or ROMAN.task().public)
    return await solve(task, run, kind, AgentOptions()), run  # type: ignore[arg-type]


def answers(run: ScriptedRun) -> list[str]:
    """What the model was told after each of its messages but the last."""
    return [messages[-1]["content"] for _, messages in run.asked[1:]]


def bash(command: str) -> str:
    return f"I do this.\n```bash\n{command}\n```"


SUBMIT = bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
