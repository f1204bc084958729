"""The environment `mhqa`: how its agents search, reason and end, and what searches for them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.mhqa.env import Mhqa
from envserver_tools.retrieval import HttpRetriever, Passage, RetrieverSettings
from support.http_stand_in import standing_in
from support.scripted_run import ScriptedRun, call, played, says

from envserver import Caller, ConfigError, InputError, Message, PublicTask, Result, ServiceError

ROW = {
    "question": "Where was the mayor of Osk born?",
    "answer": "Vell",
    "supporting_facts": [["Osk", 1], ["Ida Rann", 0]],
    "context": [
        ["Osk", ["Osk is a town.", "Its mayor is Ida Rann."]],
        ["Ida Rann", ["Ida Rann was born in Vell."]],
        ["Osk (river)", ["The Osk is a river. " * 60]],
    ],
}


async def play(
    *turns: Message, **settings: Any
) -> tuple[dict[str, Any], ScriptedRun, float | None]:
    """The output of an agent that says `turns`, its run, and the reward."""
    env = Mhqa(Mhqa.Config(**settings))
    task = env.task_from_row(ROW)
    run = ScriptedRun(turns, max_turns=10)
    output = await played(env, task, run)
    run.assert_histories_only_grow()
    return output, run, env.score(task, Result(output=output)).reward


async def test_hits_are_numbered_and_read_in_whole() -> None:
    output, run, _ = await play(
        call("search", query="Osk river", top_k=2),
        call("read", pid="p1"),
        call("read", pid="p9"),
        call("finish", answer="Vell", supporting_facts=[["p2", 1], ["Ida Rann", 0]]),
    )
    found, read, unknown = run.told()
    assert found.startswith("[p1] Osk (river)\n0: The Osk is a river.")
    assert "(read p1 shows more)" in found and "[p2] Osk\n0: Osk is a town.\n1: Its" in found
    assert len(read) > len(found) and "shows more" not in read
    assert unknown == "Error: no search has found a passage 'p9'; found: p1, p2."
    assert output["answer"] == "Vell"
    assert output["facts"] == [["Osk", 1], ["Ida Rann", 0]]
    assert output["passages"] == [Passage("Osk", tuple(ROW["context"][0][1])).key]  # type: ignore[index]
    assert run.metrics == {"searches": 1, "tool_errors": 1}


@pytest.mark.parametrize(
    ("turns", "answer"),
    [
        ([says("I think it is\nAnswer: Vell")], "Vell"),
        ([call("search", "<answer>Vell</answer>", query="x")], "Vell"),
        ([call("search", query="zzz"), says("<answer>Vell</answer>")], "Vell"),
        ([{**call("finish", answer="Vell"), "finish": "length"}], None),
        *(
            ([call(name, **arguments)] * 10, None)
            for name, arguments in (
                ("search", {"query": "x" * 301}),
                ("search", {"query": "Osk", "top_k": 11}),
                ("finish", {"answer": "x" * 201}),
                ("search", {"query": "osk"}),
            )
        ),
    ],
)
async def test_how_a_rollout_with_tools_ends(turns: list[Any], answer: str | None) -> None:
    _, run, reward = await play(*turns)
    assert reward == float(answer is not None)
    assert not any(run.left.values()) and run.actions[-1][2] == answer
    assert run.metrics.get("searches", 0) <= 8


async def test_the_script_puts_earlier_answers_into_later_questions() -> None:
    output, run, _ = await play(
        says("Well:\n1. Who is the mayor of Osk?\n2) Where was #1 born, not #7?\n"),
        says("It says so.\n**Answer:** Ida Rann"),
        says("<think>hm</think>Vell"),
        says("Vell."),
        mode="scripted",
    )
    assert output["answer"] == "Vell."
    asked = [facts["query"] for tool, facts, _ in run.actions if tool == "retrieve"]
    assert asked == ["Who is the mayor of Osk?", "Where was Ida Rann born, not #7?"]
    assert "Ida Rann was born in Vell." in run.asked[2][1][-1]["content"]
    turns = [says(text) for text in ("I do not list.", "It is Vell.", "It is Vell. " * 40)]
    output, run, _ = await play(*turns, mode="scripted")
    assert run.actions[1][1]["query"] == ROW["question"] and output["answer"] is None


@contextmanager
def retriever(*answers: Any) -> Iterator[tuple[str, list[Any]]]:
    """A server that gives `answers`, one after the other; its address, and what it was asked."""
    asked: list[Any] = []

    def answer(path: str, headers: object, body: bytes) -> tuple[int, bytes]:
        asked.append(json.loads(body))
        value = answers[min(len(asked), len(answers)) - 1]
        return (value, b"") if isinstance(value, int) else (200, json.dumps(value).encode())

    with standing_in(answer) as url:
        yield f"{url}/retrieve", asked


CALLER = Caller("r", "g", PublicTask("t", {}), lambda word: None)
CONTENTS = {"id": "7", "contents": '"Osk"\nOsk is a town.'}


async def test_an_external_retriever_is_asked_by_its_contract() -> None:
    documents = [
        {"document": CONTENTS, "score": 1.5},
        {"document": {"title": "Vell", "text": "A town."}, "score": "0.5"},
        {"document": '"Ida"\nShe.', "score": 0},
    ]
    with retriever(503, {"result": [documents]}, {"result": [[CONTENTS]]}) as (url, asked):
        async with HttpRetriever(RetrieverSettings(url=url, pause_seconds=0.01)) as external:
            hits = await external.search("Osk?", 3)
            assert [(h.passage.title, h.passage.text, h.score) for h in hits] == [
                ("Osk", "Osk is a town.", 1.5),
                ("Vell", "A town.", 0.5),
                ("Ida", "She.", 0.0),
            ]
            assert asked == [{"queries": ["Osk?"], "topk": 3, "return_scores": True}] * 2
            assert [hit.score for hit in await external.search("Osk?", 1)] == [0.0]


@pytest.mark.parametrize("answer", [500, 404, {"result": []}, {"result": [[7]]}])
async def test_a_retriever_that_fails_is_a_failure_of_ours(answer: Any) -> None:
    with retriever(answer) as (url, asked):
        env = Mhqa(Mhqa.Config(scope="external", retriever_url=url))
        async with env.services() as services:
            with pytest.raises(ServiceError):
                await services["search"]({"query": "x", "top_k": 3}, CALLER)
            for bad in ({}, {"query": 1, "top_k": 1}, {"query": "x", "top_k": 99}):
                with pytest.raises(InputError):
                    await services["search"](bad, CALLER)
    assert len(asked) == (3 if answer == 500 else 1)


async def test_a_corpus_is_indexed_once_and_searched_by_all(tmp_path: Path) -> None:
    pytest.importorskip("bm25s", reason="needs the extra `retrieval`")
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n{json.dumps({**ROW, 'question': 'Who?'})}\n")
    env = Mhqa(Mhqa.Config(data_set="hotpotqa", data_path=path, scope="corpus"))
    tasks = list(env.tasks("train"))
    assert [task.public["passages"] for task in tasks] == [[], []]
    async with env.services() as services:
        found = await services["search"]({"query": "born in Vell", "top_k": 10}, CALLER)
    assert [one["title"] for one in found] == ["Ida Rann"]  # once, though two questions have it
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"title": "Vell", "text": "A town."}\n{"no": "passage"}\n')
    env = Mhqa(Mhqa.Config(scope="corpus", corpus_path=corpus))
    with pytest.raises(ConfigError, match="line 2"):
        async with env.services():
            pass
