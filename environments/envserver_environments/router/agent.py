"""The agent: one plan, its repairs, and optionally its execution.

The router calls the model as the agent `router`; each step is executed by a sub-agent under its
own name, in the order of the dependencies, with the results of the steps that it depends on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, cast

from envserver_environments.answers import last_boxed
from envserver_environments.code.agent import solve as write_program
from envserver_environments.code.extraction import extract_code
from envserver_environments.math.agent import solve as solve_problem
from envserver_records.tasks import Json
from envserver_tools.calling import cut, visible_text
from envserver_tools.loop import chat_with_tools
from envserver_tools.retrieval import BM25
from msgspec import Meta

from envserver import ExecResult, LimitReached, LoopEnd, Message, PublicTask, Reply, Rollout, tool

from .course import Plan, PlanError, Step, as_json, read_course, read_plan
from .prompts import repair_request, system_prompt

# Each gets a brief in words and returns a Finding. They call the model under their own names, so
# that each has a sequence, and may have a model, of its own. A sub-agent whose last message was cut
# off has no answer.

MAX_PRINTED_CHARACTERS = 4000
MAX_TOOL_ERRORS = 10
DEFAULT_TOP_K = 3

Query = Annotated[str, Meta(max_length=300)]
TopK = Annotated[int, Meta(ge=1, le=20)]


@dataclass(frozen=True)
class Finding:
    """The result of a step."""

    text: str  # for the steps that depend on it
    answer: str  # a short form, if it can answer the query
    program: str | None = None  # the code agent's


@dataclass(frozen=True)
class Brief:
    """The instructions of a sub-agent."""

    task_id: str
    words: str  # its task and its inputs; it does not see the query
    documents: Sequence[dict[str, str]] = ()
    entry_point: str = ""  # the name of the function to write, "": any program that prints
    top_k: int = DEFAULT_TOP_K  # passages that a search shows first


async def carry_out(agent: str, brief: Brief, run: Rollout) -> Finding:
    own = _OwnRun(run, agent)
    finding = await SUBAGENTS[agent](brief, cast("Rollout", own))
    return Finding(finding.text, "") if own.cut_off else finding


async def do_math(brief: Brief, run: Rollout) -> Finding:
    """A problem or a calculation, with a calculator at hand."""
    public = {"question": brief.words, "options": [], "data_set": "router"}
    done = await solve_problem(PublicTask(brief.task_id, public), run, "tools")
    seen = (visible_text(done["text"]) or "").strip()
    answer = done["answer"] if done["answer"] is not None else last_boxed(seen)
    return Finding(text=answer or seen, answer=answer or "")


async def do_code(brief: Brief, run: Rollout) -> Finding:
    """Writes a program and runs it; its output is the finding."""
    public = {
        "instruction": brief.words,
        "entry_point": brief.entry_point,
        "preamble": "",
        "tests": [],
        "data_set": "router",
    }
    done = await write_program(PublicTask(brief.task_id, public), run, "single", "0")
    program = extract_code(done["text"], brief.entry_point)
    if program is None:
        return Finding("No program was written.", "")
    async with run.open_sandbox() as sandbox:
        printed = _printed(await sandbox.run_python(program))
    lines = [line for line in printed.splitlines() if line.strip()]
    text = f"Program:\n```python\n{program}\n```\nIt printed:\n{cut(printed)}"
    return Finding(text, lines[-1].strip() if lines else "", program)


async def do_search(brief: Brief, run: Rollout) -> Finding:
    """A fact from the task's documents: a loop of searches that ends with an answer."""

    @tool
    def search(query: Query, top_k: TopK = DEFAULT_TOP_K) -> str:
        """Finds passages of the documents by their words."""
        return _passages(brief.documents, query, top_k)

    first = _passages(brief.documents, brief.words, brief.top_k)
    messages: list[Message] = [
        {"role": "system", "content": system_prompt("search")},
        {"role": "user", "content": f"{brief.words}\n\nFound so far:\n{first}"},
    ]
    end = await run.loop(
        messages, tools=[search, finish], final="finish", max_tool_errors=MAX_TOOL_ERRORS
    )
    if end.result is not None:
        return Finding(end.result, end.result)
    seen = (visible_text(end.last_text) or "").strip()
    return Finding(cut(seen), seen)


@tool
def finish(answer: Annotated[str, Meta(max_length=500)]) -> str:
    """Gives what was looked for and ends the task."""
    return answer


SUBAGENTS: dict[str, Callable[[Brief, Rollout], Awaitable[Finding]]] = {
    "math": do_math,
    "code": do_code,
    "search": do_search,
}


class _OwnRun:
    def __init__(self, run: Rollout, agent: str) -> None:
        self.cut_off = False
        self._run = run
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    async def chat(self, messages: list[Message], **options: Any) -> Reply:
        reply = await self._run.chat(messages, **{**options, "agent": self._agent})
        self.cut_off = reply.finish_reason == "length"
        return reply

    async def loop(self, messages: list[Message], *, tools: Any, **options: Any) -> LoopEnd:
        return await chat_with_tools(cast("Rollout", self), messages, tools, **options)


def _printed(result: ExecResult) -> str:
    said = result.stdout[:MAX_PRINTED_CHARACTERS].decode(errors="replace")
    if result.ok:
        return said
    if result.killed_by:
        return f"{said}\n[it passed the limit of {result.killed_by}]"
    return f"{said}\n[it failed]\n{result.stderr[-1000:].decode(errors='replace')}"


def _passages(documents: Sequence[dict[str, str]], query: str, top_k: int) -> str:
    passages = [f"{document['title']}: {document['text']}" for document in documents]
    best = BM25(passages).top(query, int(top_k))
    return "\n".join(passages[number] for number, _ in best) or "Nothing was found."


ROUTER = "router"


@dataclass(frozen=True)
class ModelPlan:
    """The output of a rollout."""

    plan: str = ""
    repaired: int = 0
    cut_off: bool = False
    executed: bool = False
    answer: str | None = None
    program: str | None = None


READERS = {"graph": read_plan, "coursegpt": read_course}


async def solve(
    task: PublicTask, run: Rollout, *, repair: int, execute: bool, router: str = ROUTER
) -> Json:
    """Runs one attempt: plans as the agent `router`, with so many repairs of an invalid plan;
    `execute`: runs a valid plan whose answer can be checked."""
    output = asdict(ModelPlan())
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


def final_answer(output: Json) -> str:
    said = (output.get(name) for name in ("answer", "program", "plan"))
    return next((text for text in said if isinstance(text, str) and text), "")


async def _plan(
    task: PublicTask, run: Rollout, repair: int, output: Json, router: str
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
