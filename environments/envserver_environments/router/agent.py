"""The agent: one plan, its repairs, and optionally the plan's execution.

In: a task's public part, and `run`. Out: `{"plan", "repaired", "cut_off", "executed", "answer",
"program"}`: the text of the last plan, how often it was repaired, and the result of its final step.
The router calls the model as the agent `router`; each step is executed by a sub-agent under its own
name, in the order of the dependencies, with the results of the steps that it depends on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envserver import LimitReached, Message, PublicTask, Rollout

from .course import read_course
from .plans import Plan, PlanError, Step, as_json, read_plan
from .prompts import repair_request, system_prompt
from .subagents import DEFAULT_TOP_K, Brief, Finding, carry_out

ROUTER = "router"
READERS = {"graph": read_plan, "coursegpt": read_course}
"""Parsers of the plan in an answer, by profile."""


async def solve(
    task: PublicTask, run: Rollout, *, repair: int, execute: bool, router: str = ROUTER
) -> dict[str, Any]:
    """Runs one attempt at `task`.

    Args:
        repair: number of times that an invalid plan may be rewritten.
        execute: execute a valid plan if its answer can be checked.
        router: name of the agent that plans.
    """
    output: dict[str, Any] = {
        "plan": "",
        "repaired": 0,
        "cut_off": False,
        "executed": False,
        "answer": None,
        "program": None,
    }
    plan = await _plan(task, run, repair, output, router)
    if plan is None:
        return output
    for (before, after), payload in plan.payloads.items() if not execute else ():
        run.log_action("handoff", {"from": before, "to": after, "payload": payload})
    if execute and task.public["runs"]:
        output["executed"] = True
        found = await _run_plan(plan, task, run)
        if found is not None:
            output["answer"], output["program"] = found.answer, found.program
    run.log_action("finalize", {"final_step": plan.final_step}, final_answer(output))
    return output


def final_answer(output: Mapping[str, Any]) -> str:
    """Returns the answer in an `output` of `solve`: the result of the plan's run, else the plan."""
    said = (output.get(name) for name in ("answer", "program", "plan"))
    return next((text for text in said if isinstance(text, str) and text), "")


async def _plan(
    task: PublicTask, run: Rollout, repair: int, output: dict[str, Any], router: str
) -> Plan | None:
    profile = task.public["profile"]
    messages: list[Message] = [
        {"role": "system", "content": system_prompt(profile)},
        {"role": "user", "content": task.public["query"]},
    ]
    while True:
        reply = await run.chat(messages, agent=router)
        output["plan"] = reply.content
        output["cut_off"] = reply.finish_reason == "length"
        try:
            plan = READERS[profile](reply.content)
        except PlanError as error:
            problem = error
        else:
            run.log_action("plan", {"query": task.public["query"]}, as_json(plan))
            return plan
        why = f"{problem.kind}: {problem}"
        run.log_action("plan", {"query": task.public["query"]}, reply.content, error=why)
        if output["repaired"] >= repair or output["cut_off"]:
            return None
        output["repaired"] += 1
        messages += [reply.message, {"role": "user", "content": repair_request(problem)}]


async def _run_plan(plan: Plan, task: PublicTask, run: Rollout) -> Finding | None:
    """Returns the result of the final step, or None if a sub-agent's limit ended the run."""
    findings: dict[str, Finding] = {}
    try:
        for step in plan.in_order():
            handed = {name: findings[name].text for name in step.depends_on}
            for name, text in handed.items():
                payload = plan.payloads[name, step.id]
                run.log_action("handoff", {"from": name, "to": step.id, "payload": payload}, text)
            brief = _brief(step, handed, plan, task)
            findings[step.id] = await carry_out(step.agent, brief, run)
    except LimitReached:
        # The plan counts, whatever the result of its execution.
        return None
    return findings[plan.final_step]


def _brief(step: Step, handed: Mapping[str, str], plan: Plan, task: PublicTask) -> Brief:
    parts = [_asked(step)]
    for name, text in handed.items():
        parts.append(f"From an earlier step ({plan.payloads[name, step.id]}):\n{text}")
    return Brief(
        task_id=task.id,
        words="\n\n".join(parts),
        documents=task.public["documents"],
        entry_point=task.public["entry_point"] if step.id == plan.final_step else "",
        top_k=int(step.args.get("top_k", DEFAULT_TOP_K)),
    )


def _asked(step: Step) -> str:
    args = step.args
    match step.tool:
        case "calculate":
            return f"Calculate: {args['expression']}"
        case "run_tests":
            return (
                f"Write and run a program that tests this, and print the result: {args['target']}"
            )
        case "write":
            return str(args["task"])
        case "query":
            return str(args["q"])
    return str(args["problem"])
