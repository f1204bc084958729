"""Scenarios that another program plays (`--agent`).

It works in the folder of its own process, so the checks run elsewhere: the scorer applies its patch
to the workspace as it was, in a sandbox.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from envserver_environments.swe.agent import patch_in
from envserver_environments.swe.patches import PatchError, apply_changes, read_patch
from envserver_environments.swe.trees import git_files, tar_of
from msgspec import structs

from envserver import HarnessTask, PublicTask, Sandbox, Sandboxes

from .agent import SPEC, checks_in, run_check, tree_in


def harness_task(task: PublicTask) -> HarnessTask:
    """Returns what the program gets: the prompt and the workspace, a git repository."""
    tree = tree_in(task.public["files"])
    repository, commit = git_files(tree)
    return HarnessTask(
        instruction=task.public["prompt"],
        archive=tar_of({**tree, **repository}),
        output=partial(_output, commit),
    )


async def _output(commit: str, workspace: Sandbox, words: str) -> dict[str, Any]:
    done = await patch_in(commit, workspace, words)
    return {"answer": words, "ending": "final", "patch": done["patch"], "reason": done["reason"]}


async def checks_of_patch(
    public: dict[str, Any], output: dict[str, Any], sandboxes: Sandboxes
) -> list[dict[str, Any]]:
    """Runs the checks on the workspace with the patch; none passes if it does not apply."""
    try:
        tree = apply_changes(tree_in(public["files"]), read_patch(str(output.get("patch") or "")))
    except PatchError:
        return []
    answer = output.get("answer")
    words = answer if isinstance(answer, str) else None
    async with sandboxes.open(structs.replace(SPEC, archive=tar_of(tree))) as sandbox:
        return [await run_check(sandbox, one, words) for one in checks_in(public)]
