"""The environment `mhqa`: questions that need several facts, and passages that contain them.

`public` holds `question`, `data_set`, and `passages` in a neutral order (where agents search the
question's own ones). `hidden` holds what only scoring needs:

    golds          the answer and its aliases
    kind, hops     the data set's name for the kind; the number of facts needed
    supporting     (passage, sentence) pairs: the passage's place in `public`, or its title
    support        keys of passages, where the data set judges whole passages
    evidences      triples, each in all its forms
    decomposition  (sub-question, answer) pairs
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from envserver_environments.rows import (
    SEVERAL,
    DataEnvironment,
    FirstOption,
    NumberedRow,
    OptionRowsConfig,
    Row,
    first_option,
    id_of,
    listed,
    made,
    mixed,
)
from envserver_records.tasks import Json
from envserver_tools.retrieval import Passage, RetrieverSettings
from pydantic import Field, PositiveInt, model_validator

from envserver import (
    ConfigError,
    Environment,
    HarnessTask,
    InputError,
    KnownResult,
    Message,
    PublicTask,
    Result,
    Rollout,
    Score,
    Service,
    Split,
    Task,
)

from .agent import AgentOptions, Mode, harness_task, solve
from .data_sets import (
    DATA,
    DataSet,
    MultiHopQuestion,
    different,
    own_passages,
    read_aliases,
    read_context,
    read_corpus,
    read_item,
    single_rows,
    why_unusable,
)
from .known import demonstrate, known_answers
from .scoring import last_answer, parse_answer, score_rollout
from .shelf import MAX_TOP_K, Scope, corpus_services, external_services


class Mhqa(DataEnvironment):
    """Answer questions that need several facts, found by searching."""

    name = "mhqa"
    sample_files = {"data_path": "sample.jsonl", "corpus_path": "corpus.jsonl"}
    checks_rows = True

    class Config(OptionRowsConfig):
        """Selects the questions, the search, the agent, and the scoring."""

        data_set: Annotated[DataSet | list[DataSet], SEVERAL] = "sample"
        """Data sets (repeat the flag, or separate with commas). sample: 36 built-in tasks."""
        aliases_path: Path | None = None
        """2Wiki's id_aliases.json: further right answers, for rows with an answer_id."""
        mode: Mode = "tools"
        """tools: tool calls; text: the same tools as THOUGHT / TOOL_CALL / FINAL; tags: AFM's tags;
        scripted: sub-questions, a search and a note for each, the answer."""
        scope: Scope = "question"
        """What the search covers. question: the question's own passages; corpus: the passages of
        all questions, or those in corpus_path; external: the retriever at retriever_url."""
        corpus_path: Path | None = None
        """JSONL of passages (title, and text or sentences) for the scope corpus."""
        retriever_url: str | None = None
        """URL of the retriever for the scope external, such as http://localhost:8000/retrieve."""
        top_k: int = Field(default=3, ge=1, le=MAX_TOP_K)
        """Passages per search if the model does not say how many."""
        max_searches: PositiveInt = 8
        """Maximum searches per rollout."""
        unanswerable: bool = False
        """Include questions that the passages do not answer; `noanswer` is the right answer."""
        support_weight: float = Field(default=0.0, ge=0.0, le=1.0)
        """Share of the reward given for the F1 score of the supporting facts."""
        max_turns: PositiveInt = 10
        """Maximum model calls per rollout."""

        @model_validator(mode="after")
        def _whole(self) -> Self:
            if self.scope == "external" and not self.retriever_url:
                raise ValueError("the scope external needs a retriever_url")
            if self.scope != "external" and self.retriever_url:
                raise ValueError("retriever_url is for the scope external")
            if self.scope != "corpus" and self.corpus_path:
                raise ValueError("corpus_path is for the scope corpus")
            return self

    class Question(Environment.Question):
        """A question, and the passages to search for its answer."""

        context: Path | None = None
        """File of passages: text with blank lines between them (`# title` above one), or .json or
        .jsonl with title and text. Unset: the corpus or the retriever of the settings, or the
        model's memory if these name none."""

    @classmethod
    def write_sample(cls, folder: Path) -> Mapping[str, Any]:
        return {**super().write_sample(folder), "scope": "corpus"}

    def tasks(self, split: Split) -> Iterator[Task]:
        streams = [self._tasks_of(name, split) for name in listed(self.config.data_set)]
        return mixed(streams, f"mix-{self.config.seed}-{split}")

    async def rollout(self, task: PublicTask, run: Rollout) -> Json:
        return await solve(task, run, self._options(task))

    def _options(self, task: PublicTask) -> AgentOptions:
        config = self.config
        from_memory = config.scope == "question" and not task.public["passages"]
        return AgentOptions(
            mode="memory" if from_memory else config.mode,
            # A person's own passages are searched, whatever the scope is.
            scope="question" if task.public["passages"] else config.scope,
            top_k=config.top_k,
            max_searches=config.max_searches,
            unanswerable=config.unanswerable,
        )

    def harness_task(self, task: PublicTask, run: Rollout) -> HarnessTask:
        return harness_task(task, run, self._options(task))

    def score(self, task: Task, result: Result) -> Score:
        return score_rollout(task, result, self.config.support_weight)

    def services(self) -> AbstractAsyncContextManager[Mapping[str, Service]]:
        config = self.config
        match config.scope:
            case "corpus":
                return corpus_services(self._corpus)
            case "external":
                return external_services(RetrieverSettings(url=config.retriever_url))
        return super().services()

    def demonstration(self, task: Task) -> list[Message] | None:
        return demonstrate(task, self.config.mode)

    def known_results(self, task: Task) -> Iterator[KnownResult]:
        return known_answers(task, self.config.support_weight)

    def task_from_row(self, row: Json) -> Task:
        item = self._read(row, lambda: self.config.first_option or 0)
        return make_task(id_of(row), item, "question")

    def response_from_row(self, response: str, messages: list[Message]) -> Result:
        words = last_answer(messages) if messages else parse_answer(response)
        output = {**dataclasses.asdict(words), "text": response}
        return Result(output=output, messages=messages)

    def task_from_question(self, request: Question) -> Task:
        item = MultiHopQuestion(
            question=request.question.strip(),
            golds=(request.answer,) if request.answer is not None else (),
            data_set="own",
            passages=tuple(read_context(request.context)) if request.context is not None else (),
        )
        if not item.question:
            raise InputError("The question is empty.")
        question = item.question.encode("utf-8", "surrogatepass")
        key = hashlib.blake2b(question, digest_size=6).hexdigest()
        return make_task(f"question-{key}", item, "question")

    def _tasks_of(self, name: DataSet, split: Split) -> Iterator[Task]:
        read = made(
            self._rows(name, split), lambda row, numbered: self._task(row, numbered.task_id(name))
        )
        path = self.config.data_path
        return self.rows.usable(path.name if path else name, read)

    def _task(self, row: Row, task_id: str) -> Task:
        item = self._item(row)
        with_passages = self.config.scope == "question"
        if not item.answerable and not (self.config.unanswerable and with_passages):
            raise InputError("it has no answer: `unanswerable` takes it, with the scope question")
        if with_passages and not item.passages:
            raise InputError(
                "it has no passages to search: --env.scope corpus with --env.corpus_path, or"
                " external with --env.retriever_url"
            )
        return make_task(task_id, item, self.config.scope)

    def _rows(self, name: DataSet, split: Split) -> Iterator[NumberedRow]:
        rows = DATA.rows(name, self.config.data_path, split, self.config.seed)
        return (part for row in rows for part in row.parts(single_rows))

    def _item(self, row: Row) -> MultiHopQuestion:
        item = self._read(row, self._first_option)
        if why := why_unusable(item):
            raise InputError(why)
        return item

    def _read(self, row: Row, first: FirstOption) -> MultiHopQuestion:
        return read_item(row, own_passages(), self.config.columns, self._aliases, first)

    @functools.cached_property
    def _first_option(self) -> FirstOption:
        config = self.config
        return first_option(
            config.first_option, config.data_path, config.split, self._read, single_rows
        )

    @functools.cached_property
    def _aliases(self) -> dict[str, list[str]]:
        return read_aliases(self.config.aliases_path)

    def _corpus(self) -> Iterator[Passage]:
        if self.config.corpus_path is not None:
            return different(read_corpus(self.config.corpus_path))
        return different(self._all_passages())

    def _all_passages(self) -> Iterator[Passage]:
        for name in listed(self.config.data_set):
            if name == "sample" and self.config.data_path is None:
                yield from own_passages().values()
                continue
            found = False
            rows = self._rows(name, self.config.split)
            for _, item in made(rows, lambda row, _: self._item(row)):
                if isinstance(item, MultiHopQuestion):
                    found = found or bool(item.passages)
                    yield from item.passages
            if not found:
                raise ConfigError(
                    f"The data set {name!r} has no passages to search.",
                    hint="Set corpus_path, or --env.scope external with a retriever_url.",
                )


def make_task(
    task_id: str, item: MultiHopQuestion, scope: Literal["question", "corpus", "external"]
) -> Task:
    passages = list(different(item.passages)) if scope == "question" else []
    random.Random(item.question.encode("utf-8", "surrogatepass")).shuffle(passages)
    places = {passage.title: place for place, passage in enumerate(passages)}
    return Task(
        task_id,
        {
            "question": item.question,
            "data_set": item.data_set,
            "passages": [passage.as_data() for passage in passages],
        },
        {
            "golds": list(item.golds),
            "kind": item.kind,
            "hops": item.hops,
            "answerable": item.answerable,
            "supporting": [[places.get(title, title), number] for title, number in item.supporting],
            "support": list(item.support),
            "evidences": [[list(way) for way in ways] for ways in item.evidences],
            "decomposition": [list(step) for step in item.decomposition],
        },
    )
