"""The environment `mhqa`: its questions, where they come from, and how passages are found."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from envserver_environments.mhqa.data_sets import read_context, read_item
from envserver_environments.mhqa.env import Mhqa
from envserver_records.tasks import Json
from envserver_tools.retrieval import FewPassages, Hit, Passage, PassageIndex
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import cases_of, write_jsonl
from support.extent import examples

from envserver import InputError, Result, Task

bm25s = pytest.importorskip("bm25s", reason="needs the extra `retrieval`")

CASES = cases_of(__file__, "mhqa_cases.json")
ROWS: dict[str, Json] = CASES["rows"]
"""One question as each data set has it."""


def sample(**settings: Any) -> list[Task]:
    return list(Mhqa(Mhqa.Config(**settings)).tasks("train"))


def test_unanswerable_twins_lack_what_they_need() -> None:
    tasks = {task.id: task for task in sample(unanswerable=True)}
    for name, twin in tasks.items():
        if twin.hidden["answerable"]:
            continue
        task = tasks[name.removesuffix("-unanswerable")]
        assert task.public["question"] == twin.public["question"]
        assert task.hidden["golds"][0] not in json.dumps(twin.public["passages"])
        assert twin.hidden["golds"][0] == "noanswer"


def test_nothing_public_tells_which_passages_matter() -> None:
    places = Counter(place for task in sample() for place, _ in task.hidden["supporting"])
    assert len(places) == 10 and max(places.values()) < 2.5 * sum(places.values()) / 10
    task = Mhqa().task_from_row(ROWS["musique"])
    assert all(set(one) == {"title", "sentences"} for one in task.public["passages"])


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_each_data_set_are_read(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    path = tmp_path / "rows.jsonl"
    empty = {**row, "answer": "the", "answer_aliases": []}
    path.write_text(f"{json.dumps(row)}\nno JSON\n{json.dumps(empty)}\n")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"title": "Osk", "text": "A town."}\n')
    scope: Json = {"scope": "corpus", "corpus_path": corpus} if name == "afm" else {}
    env = Mhqa(Mhqa.Config(data_set=name, data_path=path, **scope))
    (task,) = env.tasks("train")
    assert sum(env.rows.dropped.values()) == 2
    assert env.score(task, Result(output={"answer": "Vell", "text": ""})).reward == 1
    if "answer_aliases" in row or name == "afm":
        assert env.score(task, Result(output={"answer": "Vell on Osk"})).reward < 0.2
        assert env.score(task, Result(output={"answer": "vell-on-osk"})).reward == 1
    for known in env.known_results(task):
        reward = env.score(task, known.result).reward
        assert reward is not None and known.least <= reward <= known.most + 1e-9, known
    assert env.task_from_row(row).hidden["golds"] == task.hidden["golds"]


def test_support_is_judged_as_its_data_set_does() -> None:
    env = Mhqa(Mhqa.Config(support_weight=1.0))
    for name in ("hotpotqa", "2wiki", "musique"):
        task = env.task_from_row(ROWS[name])
        (best, *_) = env.known_results(task)
        score = env.score(task, best.result)
        assert score.reward == score.metrics["support_f1"] == 1
        assert env.score(task, Result(output={"answer": "Vell", "facts": []})).reward == 0
    musique = env.task_from_row(ROWS["musique"])
    facts = {"answer": "Vell", "facts": [["Ida", 0]]}
    assert env.score(musique, Result(output=facts)).reward == pytest.approx(2 / 3)


@pytest.mark.parametrize("case", CASES["published"], ids=lambda case: case["card"])
def test_rows_are_read_as_their_cards_show_them(case: Json) -> None:
    names = {"Q7": ["Vell-on-Osk"]}
    found = vars(read_item(case["row"], columns=case.get("columns"), aliases=names))
    found |= {"golds": list(found["golds"])}
    found |= {"passages": [[passage.title, passage.text] for passage in found["passages"]]}
    expected = {name: value for name, value in case.items() if name in found}
    assert found | expected == found


@pytest.mark.parametrize(("row", "said"), CASES["refused"])
def test_what_a_row_lacks_is_said(row: Json, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_item(row)


@pytest.mark.parametrize(("fields", "ids"), CASES["ids"])
def test_a_task_has_the_id_of_its_row_where_no_other_row_has_it(
    tmp_path: Path, fields: list[Json], ids: list[str]
) -> None:
    path = tmp_path / "rows.json"
    rows = [{"question": f"Who is {n}?", "answer": "Vell", "context": "x", **one}
            for n, one in enumerate(fields)]  # fmt: skip
    path.write_text(json.dumps(rows))
    for seed in (0, 1):
        assert sorted(task.id for task in sample(data_path=path, seed=seed)) == ids


@pytest.mark.parametrize("case", CASES["nested"], ids=lambda case: case["card"])
def test_a_row_may_hold_several_questions(tmp_path: Path, case: Json) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(case["file"]))
    tasks = sample(data_path=path, unanswerable=True)
    assert len({task.id for task in tasks}) == len(tasks)
    shown = [
        [task.public["question"], *task.public["passages"][0]["sentences"], task.hidden["golds"][0]]
        for task in tasks
    ]
    assert sorted(shown) == sorted(case["questions"])


def test_what_is_no_task_is_dropped_by_cause_and_names_its_setting(tmp_path: Path) -> None:
    path, names = tmp_path / "rows.jsonl", tmp_path / "id_aliases.json"
    two = [
        ROWS["2wiki"] | {"answer_id": "Q7"},
        ROWS["musique"] | {"answerable": False},
        ROWS["afm"],
    ]
    write_jsonl(path, two)
    names.write_text('{"Q_id": "Q7", "aliases": ["V."], "demonyms": ["Vellish"]}\n' * 2)
    env = Mhqa(Mhqa.Config(data_set="musique", data_path=path, aliases_path=names))
    (task,) = env.tasks("train")
    assert task.hidden["golds"] == ["Vell", "V.", "Vellish"]
    assert ["`unanswerable`" in cause or "--env.scope" in cause for cause in env.rows.dropped] == [
        True, True
    ]  # fmt: skip


def test_a_person_writes_passages_down(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("# Osk\nA town.\nOn a river.\n\nNobody's.\n\n# Vell\n\nAnother town.\n")
    assert read_context(path) == [
        Passage("Osk", ("A town.", "On a river.")),
        Passage("Passage 2", ("Nobody's.",)),
        Passage("Vell", ("Another town.",)),
    ]
    path = tmp_path / "some.json"
    path.write_text('[{"title": "Osk", "text": "A town."}, "\\"Vell\\"\\nAnother town."]')
    assert read_context(path) == [
        Passage("Osk", ("A town.",)),
        Passage("Vell", ("Another town.",)),
    ]
    path.write_text("[]")
    with pytest.raises(InputError, match="no passages"):
        read_context(path)


WORDS = st.sampled_from(["osk", "vell", "mayor", "river", "the", "a", "Ida", "über", "3.5"])
TEXTS = st.lists(WORDS, max_size=6).map(" ".join)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(TEXTS, max_size=8), TEXTS)
def test_both_indexes_find_the_same(texts: list[str], query: str) -> None:
    passages = [Passage(str(number), (text,)) for number, text in enumerate(texts)]
    few, all_ = FewPassages(passages).search(query, 5), PassageIndex(passages).search(query, 5)
    assert [hit.score for hit in few] == pytest.approx([hit.score for hit in all_], rel=1e-4)
    assert all(hit.score > 0 for hit in few)
    assert titles(few) == titles(all_)


def titles(hits: list[Hit]) -> list[str]:
    return [hit.passage.title for hit in hits]


def test_a_large_corpus_is_searched_in_order() -> None:
    passages = [Passage(f"t{n}", ("osk " * (1 + n % 7) + "vell",)) for n in range(9000)]
    hits = PassageIndex(passages).search("osk", 3)
    assert titles(hits) == ["t6", "t13", "t20"]
