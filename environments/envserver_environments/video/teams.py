"""Answers a question with one agent, or with a team of experts.

    single   one agent with all tools
    report   an expert for each modality that the video has, each by itself, at the same time; if
             they do not all name the same answer, an organizer reads their reports and decides
    star     an organizer asks one expert at a time, by `route`, until it knows the answer
    blind    the question alone: measures how far the text gets without any video

Each agent of a team has a name and an append-only conversation: it is one sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from envserver_records.tasks import Json
from envserver_records.waiting import cancel_and_wait
from envserver_tools.calling import Tool, ToolError, cut, function_tool, toolbox

from envserver import PublicTask, Rollout

from .agent import (
    MAX_ANSWER_CHARACTERS,
    TOOLS_OF,
    Agent,
    AgentAnswer,
    Finished,
    FrameViewer,
    finish_tool,
    video_tools,
)
from .context import VideoContext
from .prompts import about, question, reports, system_prompt
from .scoring import final_answer, same_answer

if TYPE_CHECKING:
    from .env import Video

Mode = Literal["single", "report", "star"]
Frames = Literal["off", "all", "tool"]
ORGANIZER = "organizer"
FRAMES = "frames"
"""The expert who sees the video, and the service that shows it."""
FINAL_ANSWER = "FINAL_ANSWER"
MAX_COMMENT_CHARACTERS = 2000

_MODALITY_NAMES: dict[str, str] = {
    "captions": "the captions",
    "transcript": "the transcript",
    "scene_graph": "the scene graphs",
    FRAMES: "frames of the video",
}
_NO_ANSWER = "(no answer)"
_BEGINNING = 300
T = TypeVar("T")


async def solve(task: PublicTask, run: Rollout, config: Video.Config) -> Json:
    public = task.public
    experts: dict[str, AgentAnswer] = {}
    if config.blind:
        answer = await _blind(public, run)
    else:
        context = VideoContext.of_json(public["context"] or {})
        texts = (line.text for name in context.modalities for line in context.lines(name))
        run.log_action("load_context", {"path": public["video"]}, " ".join(texts)[:_BEGINNING])
        team = _Team(run, config, public, context)
        answer, experts = await team.solve()
    answers = {name: expert.words for name, expert in experts.items()}
    final = final_answer(answer, public["options"])
    run.log_action("finalize", {}, final)
    return {"answer": answer.answer, "text": answer.text, "experts": answers, "final_answer": final}


async def _blind(public: Json, run: Rollout) -> AgentAnswer:
    messages = [
        {"role": "system", "content": system_prompt("blind")},
        {"role": "user", "content": question(public)},
    ]
    reply = await run.chat(messages)
    run.log_action("reason", {"seen": messages[-1]["content"]}, reply.content)
    return AgentAnswer() if reply.finish_reason == "length" else AgentAnswer(text=reply.content)


class _Team:
    def __init__(
        self, run: Rollout, config: Video.Config, public: Json, context: VideoContext
    ) -> None:
        self._run = run
        self._config = config
        self._options: list[str] = public["options"]
        self._question = question(public)
        self._context = context
        self._tools = video_tools(context)
        self._frames: Frames = config.frames if public.get("file") else "off"

    async def solve(self) -> tuple[AgentAnswer, dict[str, AgentAnswer]]:
        match self._config.mode:
            case "single":
                return await self._single(), {}
            case "report":
                return await self._report()
            case "star":
                return await self._star()

    async def _single(self) -> AgentAnswer:
        texts = not self._frames_only
        names = list(self._tools) if texts else []
        if self._frames == "off":
            agent = self._agent(None, system_prompt("single"), names)
            return await agent.ask(f"{self._question}\n\n{about(self._context)}")
        prompt = system_prompt("single_frames" if texts else "frames_only")
        agent = await self._seeing(None, prompt, names)
        known = [about(self._context)] if texts else []
        return await agent.ask("\n\n".join([self._question, *known]))

    async def _report(self) -> tuple[AgentAnswer, dict[str, AgentAnswer]]:
        experts = await self._experts()
        questions = [self._ask(agent, self._question) for agent in experts.values()]
        answers = dict(zip(experts, await together(questions), strict=True))
        first, *others = answers.values()
        agreed = all(same_answer(first, other, self._options) for other in [first, *others])
        self._run.log_metric("disagreed", float(not agreed))
        return (first if agreed else await self._organized(answers)), answers

    async def _organized(self, answers: dict[str, AgentAnswer]) -> AgentAnswer:
        expert_reports = [
            (_MODALITY_NAMES[name], cut(answer.words or _NO_ANSWER))
            for name, answer in answers.items()
        ]
        messages = [
            {"role": "system", "content": self._organizer_prompt("organizer_report")},
            {"role": "user", "content": f"{self._question}\n\n{reports(expert_reports)}"},
        ]
        how: Json = {}
        if self._config.organizer_schema:
            how["response_format"] = _schema(self._options)
        reply = await self._run.chat(messages, agent=ORGANIZER, **how)
        self._run.log_action("organize", {"reports": dict(expert_reports)}, reply.content)
        return AgentAnswer() if reply.finish_reason == "length" else AgentAnswer(text=reply.content)

    async def _star(self) -> tuple[AgentAnswer, dict[str, AgentAnswer]]:
        experts = await self._experts()
        star = _Star(self._run, self._question, experts, self._config.max_rounds)
        organizer = Agent(
            self._run,
            ORGANIZER,
            system=self._organizer_prompt("organizer_star"),
            tools=toolbox(star.route()),
            protocol=self._config.protocol,
            ending="ending_route",
            max_turns=self._config.max_rounds,
        )
        known = [] if self._frames_only else [about(self._context)]
        return await organizer.ask("\n\n".join([self._question, *known])), star.answers

    @property
    def _frames_only(self) -> bool:
        return not self._context.modalities and self._frames != "off"

    def _organizer_prompt(self, name: str) -> str:
        more = [system_prompt("organizer_frames")] if self._frames != "off" else []
        return "\n\n".join([system_prompt(name), *more])

    async def _experts(self) -> dict[str, Agent]:
        experts = {
            str(name): self._agent(
                name,
                system_prompt("expert").format(modality=_MODALITY_NAMES[name]),
                list(TOOLS_OF[name]),
            )
            for name in self._context.modalities
        }
        if self._frames != "off":
            experts[FRAMES] = await self._seeing(FRAMES, system_prompt("expert_frames"), [])
        return experts

    async def _seeing(self, name: str | None, system: str, names: list[str]) -> Agent:
        frames = FrameViewer(self._run)
        if self._frames == "all":
            await frames.show()
            return self._agent(name, system, names, frames)
        return self._agent(name, system, names, frames, toolbox(frames.tool()))

    def _agent(
        self,
        name: str | None,
        system: str,
        names: list[str],
        frames: FrameViewer | None = None,
        more: Mapping[str, Tool] = {},
    ) -> Agent:
        tools = {tool: self._tools[tool] for tool in names} | dict(more)
        if self._config.protocol == "tools":
            tools |= toolbox(finish_tool())
        return Agent(
            self._run,
            name,
            system=system,
            tools=tools,
            protocol=self._config.protocol,
            frames=frames,
        )

    async def _ask(self, agent: Agent, question: str) -> AgentAnswer:
        answer = await agent.ask(question)
        self._run.log_action("expert_report", {"agent": agent.name}, answer.words)
        return answer


@dataclass
class _Star:
    run: Rollout
    question: str
    experts: Mapping[str, Agent]
    rounds_left: int
    answers: dict[str, AgentAnswer] = field(default_factory=dict)

    def route(self) -> Tool:
        """The tool `route`; it raises Finished with the final answer."""
        description = function_tool(
            "route",
            "Asks an expert, or gives the final answer.",
            {
                "next": {"type": "string", "enum": [*self.experts, FINAL_ANSWER]},
                "comment": {
                    "type": "string",
                    "maxLength": MAX_COMMENT_CHARACTERS,
                    "description": "What the expert should find out, or why this is the answer.",
                },
                "answer": {
                    "type": "string",
                    "maxLength": MAX_ANSWER_CHARACTERS,
                    "description": f"With {FINAL_ANSWER}: the answer alone.",
                },
            },
            ["next", "comment"],
        )
        return Tool(description, self._route)

    async def _route(self, next: str, comment: str, answer: str | None = None) -> str:
        self.run.log_action("organize", {"next": next, "comment": comment}, answer)
        if next == FINAL_ANSWER:
            raise Finished(comment if answer is None else answer)
        if answer is not None:
            raise ToolError(f"answer goes with {FINAL_ANSWER} only.")
        known = next in self.answers
        question = comment if known else f"{self.question}\n\n{comment}".strip()
        report = await self.experts[next].ask(question)
        self.answers[next] = report
        self.run.log_action("expert_report", {"agent": next}, report.words)
        self.run.log_metric("experts_asked", float(len(self.answers)))
        self.rounds_left -= 1
        last = "\n(Your next message must give the final answer.)" if self.rounds_left == 1 else ""
        return cut(report.words or _NO_ANSWER) + last


async def together(coroutines: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Awaits all of them concurrently; if one raises, the others are cancelled first."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(*tasks)


def _schema(options: list[str]) -> Json:
    letters = [f"Option {chr(ord('A') + place)}" for place in range(len(options))]
    answer = {"type": "string", "enum": letters} if options else {"type": "string"}
    schema = {
        "type": "object",
        "properties": {"reasoning": {"type": "string"}, "answer": answer},
        "required": ["reasoning", "answer"],
        "additionalProperties": False,
    }
    return {
        "type": "json_schema",
        "json_schema": {"name": "decision", "strict": True, "schema": schema},
    }
