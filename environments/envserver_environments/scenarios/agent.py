"""The agent: the text protocol with workspace tools, followed by the checks, in a sandbox with a
git repository of one commit. The model's processes are gone when the checks' files are written."""

from __future__ import annotations

import asyncio
import base64
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from envserver_environments.swe.agent import patch_in
from envserver_environments.swe.patches import PatchError, apply_changes, read_patch
from envserver_environments.swe.trees import Entry, Tree, git_files, tar_of
from envserver_records.tasks import Json
from envserver_tools import PRELOAD, ProtocolRun, describe_tools, run_protocol, sandbox_tools
from envserver_tools.protocol import FORMAT, Window, trace
from msgspec import structs

from envserver import (
    HarnessTask,
    InputError,
    LimitReached,
    Message,
    PublicTask,
    Rollout,
    Sandbox,
    Sandboxes,
    SandboxLimits,
    SandboxSpec,
)

from .loading import Check

NAMES = ("read_file", "write_file", "list_dir", "run_cmd", "git_diff", "grep")
SPEC = SandboxSpec(
    preload=PRELOAD,
    limits=SandboxLimits(
        wall_seconds=600.0,
        cpu_seconds=600.0,
        memory_mb=1024,
        disk_mb=256,
        inodes=20_000,
        processes=64,
        output_kb=1024,
        input_kb=8192,
    ),
)
CHARACTERS_PER_TOKEN = 3.5
"""Used if no tokenizer is known."""
_SHARE_OF_TIME = 0.9
"""The model's share of the run's time; the rest is for the checks."""
_MOST_CHECKED_BYTES = 1 << 20

SYSTEM = """\
You work in a workspace: the directory /work, a git repository. Solve the task with these tools:

{tools}

{format}"""


async def work(
    task: PublicTask,
    run: Rollout,
    *,
    max_retries: int,
    command_seconds: int,
    window: Window | None,
) -> Json:
    """Runs once; returns `{"answer", "ending", "checks", "trace"}`, whatever the model did."""
    public, started = task.public, time.time()
    done = ProtocolRun()
    checks: list[Json] = []
    tree = tree_in(public["files"])
    repository, commit = git_files(tree)
    spec = structs.replace(SPEC, archive=tar_of({**tree, **repository}))
    async with run.open_sandbox(spec) as sandbox:
        tools = sandbox_tools(sandbox, names=NAMES, command_seconds=command_seconds, base=commit)
        system = SYSTEM.format(tools=describe_tools(tools.values()), format=FORMAT)
        messages: list[Message] = [
            {"role": "system", "content": system},
            {"role": "user", "content": public["prompt"]},
        ]
        try:
            # Cut off from outside it would leave no trace.
            async with asyncio.timeout(run.seconds_left * _SHARE_OF_TIME):
                await run_protocol(
                    run.chat,
                    tools,
                    messages,
                    max_steps=run.max_turns,
                    max_retries=max_retries,
                    window=window,
                    record=done,
                    seed=public["seed"],
                )
            checks = [await run_check(sandbox, check, done.answer) for check in checks_in(public)]
        except LimitReached as limit:
            done.note("error", f"limit: {limit.message}")
        except TimeoutError:
            done.note("error", "limit: The time of this run is used up.")
    _log(run, done)
    run.log_metric("tool_errors", done.tool_errors)
    written = trace(
        done,
        scenario=public["scenario"],
        model=public["model"]["name"] or run.model,
        hf_id=public["model"]["hf_id"],
        backend=public["model"]["backend"],
        label=public["label"],
        number=public["number"],
        prompt=public["prompt"],
        seed=public["seed"],
        started=started,
    )
    if checks:
        written["checks"] = checks
    ending = done.ending or "limit"
    return {"answer": done.answer, "ending": ending, "checks": checks, "trace": written}


def _log(run: Rollout, done: ProtocolRun) -> None:
    """The steps as actions: a call and its result are one."""
    tool, args = "", {}
    for step in done.steps:
        match step["type"]:
            case "tool_call":
                tool, args = step["tool"], step["args"]
            case "tool_result":
                run.log_action(tool, args, step["text"])
            case str(kind):
                names = {"thought": "reason", "final": "finalize"}
                run.log_action(names.get(kind, kind), {}, step["text"])


def files_of(tree: Tree) -> dict[str, list[str]]:
    """`tree` as JSON: path -> [kind, "text" or "base64", content]."""
    files = {}
    for path, entry in tree.items():
        try:
            files[path] = [entry.kind, "text", entry.data.decode()]
        except UnicodeDecodeError:
            files[path] = [entry.kind, "base64", base64.b64encode(entry.data).decode()]
    return files


def tree_in(files: dict[str, list[Any]]) -> Tree:
    return {
        path: Entry(base64.b64decode(text) if form == "base64" else text.encode(), kind)
        for path, (kind, form, text) in files.items()
    }


def counter(tokenizer: Any | None) -> Callable[[list[Message]], int]:
    """Tokens of messages: by `tokenizer` (of `tokenizers`), else by their characters."""

    def count(messages: list[Message]) -> int:
        texts = [str(message.get("content") or "") for message in messages]
        if tokenizer is None:
            return int(sum(map(len, texts)) / CHARACTERS_PER_TOKEN)
        return sum(len(tokenizer.encode(text).ids) + 4 for text in texts)

    return count


def checks_in(public: Json) -> list[Check]:
    return [Check.model_validate(check) for check in public["checks"]]


async def run_check(sandbox: Sandbox, check: Check, answer: str | None) -> Json:
    for path, text in check.files.items():
        await sandbox.write(path, text.encode())
    if check.run is not None:
        limits = structs.replace(SPEC.limits, wall_seconds=check.seconds, cpu_seconds=check.seconds)
        result = await sandbox.exec(check.run, limits=limits)
        said = (result.stdout + result.stderr)[-500:].decode("utf-8", "replace")
        return {"name": check.title, "passed": result.ok, "said": said}
    if check.file is None:
        passed = answer is not None and check.holds(answer)
        return {"name": check.title, "passed": passed, "said": ""}
    try:
        data = await sandbox.read(check.file, _MOST_CHECKED_BYTES)
    except InputError:
        return {"name": check.title, "passed": check.absent, "said": "there is no such file"}
    text = data.decode("utf-8", "replace")
    return {"name": check.title, "passed": not check.absent and check.holds(text), "said": ""}


def named(text: str) -> str:
    """`text` as a part of a task's id."""
    return re.sub(r"[^\w.-]", "_", text)[:80] or "scenario"


def harness_task(task: PublicTask) -> HarnessTask:
    tree = tree_in(task.public["files"])
    repository, commit = git_files(tree)
    return HarnessTask(
        instruction=task.public["prompt"],
        archive=tar_of({**tree, **repository}),
        output=partial(_output, commit),
    )


async def _output(commit: str, workspace: Sandbox, words: str) -> Json:
    done = await patch_in(commit, workspace, words)
    return {"answer": words, "ending": "final", "patch": done["patch"], "reason": done["reason"]}


async def checks_of_patch(public: Json, output: Json, sandboxes: Sandboxes) -> list[Json]:
    """Runs the checks on the workspace with the patch; none passes if it does not apply."""
    try:
        tree = apply_changes(tree_in(public["files"]), read_patch(str(output.get("patch") or "")))
    except PatchError:
        return []
    answer = output.get("answer")
    words = answer if isinstance(answer, str) else None
    async with sandboxes.open(structs.replace(SPEC, archive=tar_of(tree))) as sandbox:
        return [await run_check(sandbox, check, words) for check in checks_in(public)]
