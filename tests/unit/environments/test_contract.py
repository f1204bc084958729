"""What every shipped environment promises: settings, splits, tasks, demonstrations, rewards.

A new environment goes through all of it by being an entry point; what is special of one is in its
own file. Demonstrations are played through the rollout by scripted models, with real services and
sandboxes; those of `gaia`, whose agents speak HTTP, by test_gaia_agents.py and the command `check`.
"""

import json
import shlex
import shutil
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import pytest
from envserver_environments.code.hoisting import hoisted
from envserver_environments.code.known import FAST, SLOW, cheats_for
from envserver_environments.mhqa.metrics import SPECIAL
from envserver_environments.router.course import plan_of
from envserver_environments.tau.domains.loading import OWN
from envserver_records.tasks import Json
from support.cases import cases_of, write_jsonl
from support.commands import envserver as command
from support.commands import read_jsonl
from support.extent import first_of
from support.scripted_run import ScriptedRun, played, scored

import envserver
from envserver import (
    ConfigError,
    Environment,
    EnvserverError,
    Result,
    Sandboxes,
    Score,
    ScorerError,
    Split,
    Task,
)
from envserver.registry import builtin_names, find
from envserver.rollouts.checking import Plays, RowsToCheck, check, secrets_of
from envserver.rollouts.rewards import rules_of_rewards
from envserver.rollouts.scorer_process import RowScore, row_scores
from envserver.rollouts.stream import digest_of

NAMES = builtin_names()
assert len(NAMES) == 13
SPLITS = get_args(Split)
MADE = ("kuhn", "proposer_solver", "visual_counting")
"""Environments that make their tasks; those of the others come from files."""


def made(name: str, rooms: Sandboxes | None = None, **settings: Any) -> Any:
    kind = find(name)
    environment = kind(kind.Config(**settings))
    if rooms is not None:
        environment.sandboxes = rooms
    return environment


def first(environment: Environment, split: Split = "train", most: int = 60) -> list[Task]:
    return list(islice(environment.tasks(split), most))


CASES = cases_of(__file__, "contract_cases.json")
WRONG = CASES["wrong_settings"]
"""Of environments: settings, and what their refusal says."""


@pytest.mark.parametrize("name", NAMES)
def test_settings_that_do_not_exist_or_fit_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for settings, said in (
        ({"nosuch": 1}, "Extra inputs are not permitted"),
        ({"split": "nosuch"}, "'train', 'validation' or 'test'"),
        ({"seed": "x"}, "integer"),
        ({"total_steps": 0}, "greater than or equal to 1"),
        *WRONG.get(name, ()),
    ):
        kinds = (FileNotFoundError,) if "things_path" in settings else (EnvserverError, ValueError)
        with pytest.raises(kinds) as told:
            next(made(name, **settings).tasks("train"))
        assert said in f"{told.value}", settings
    with pytest.raises(ConfigError, match=r"There is no setting 'env\.nosuch'"):
        list(envserver.groups(name, model="sim", env={"nosuch": 1}))


@pytest.mark.parametrize("name", NAMES)
def test_tasks_are_the_same_for_a_seed_and_hide_what_is_hidden(name: str) -> None:
    orders = []
    for split in SPLITS:
        one, again, other = (first(made(name, seed=seed), split) for seed in (1, 1, 2))
        assert list(map(digest_of, one)) == list(map(digest_of, again))
        assert one != other or len(one) == 1
        orders.append([task.id for task in one])
        assert len(set(orders[-1])) == len(one) > 0
        for task in one:
            shown = json.dumps(task.public)
            assert not set(task.hidden) & set(task.public) - {"tests"}  # of code, half are shown
            assert not any(json.dumps(secret)[1:-1] in shown for secret in secrets_of(task))
            assert "evaluation_criteria" not in shown and "env_assertions" not in shown


DIVIDED: list[tuple[str, Json, tuple[Split, ...]]] = [
    ("visual_counting", {}, SPLITS),
    *(("tau", {"domain": domain}, ("train", "test")) for domain in OWN),
]
"""Whose splits have no task in common; shipped samples are the same in each."""


@pytest.mark.parametrize(("name", "settings", "splits"), DIVIDED)
def test_splits_that_are_divided_never_meet(
    name: str, settings: Json, splits: tuple[Split, ...]
) -> None:
    parts = [first(made(name, **settings), split, 150) for split in splits]
    shown = [json.dumps({**task.public, "id": None}) for part in parts for task in part]
    assert all(parts) and len(set(shown)) == len(shown)


@pytest.mark.parametrize(("name", "settings", "split", "there"), CASES["absent"])
def test_a_split_that_is_not_there_names_those_that_are(
    name: str, settings: Json, split: Split, there: str
) -> None:
    with pytest.raises(ConfigError, match="has no split") as told:
        next(made(name, **settings).tasks(split))
    assert there in told.value.hint


@pytest.mark.parametrize("name", ["code", "math", "mhqa", "router", "swe", "video"])
def test_a_folder_without_a_split_names_the_file_it_looks_for(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    environment = made(
        name, data_path=tmp_path, **({"data_set": "coursegpt"} if name == "router" else {})
    )
    with pytest.raises(EnvserverError, match=r"no rows of the split 'validation'\. It has train"):
        next(environment.tasks("validation"))


@pytest.mark.parametrize("name", NAMES)
def test_sample_files_are_read_by_their_environment(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in MADE:
        assert envserver.main(["sample", name, "--out", str(tmp_path / name)]) == 2
        assert "are generated" in capsys.readouterr().err
        assert not (tmp_path / name).exists()
        return
    needs_a_sandbox = {"swe": "check_gold", "code": "check_references"}
    more = {needs_a_sandbox[name]: False} if name in needs_a_sandbox else {}
    gone, folder = tmp_path / "gone", tmp_path / "here"
    for place in (gone, folder):
        place.mkdir()
        written = find(name).write_sample(place)
        if place == gone:
            shutil.rmtree(gone)
            with pytest.raises((EnvserverError, OSError)):
                first(made(name, **written, **more))
    environment = made(name, **written, **more)
    assert first(environment) and not getattr(environment, "dropped", {})


@pytest.mark.parametrize("name", ["mhqa", "router", "video"])
def test_rows_with_the_same_id_are_different_tasks(name: str, tmp_path: Path) -> None:
    written = find(name).write_sample(tmp_path)
    ids = {row["id"] for row in read_jsonl(written["data_path"])}
    with written["data_path"].open("a") as file:
        file.write(written["data_path"].read_text())
    tasks = [task.id for task in made(name, **written).tasks("train")]
    assert len(set(tasks)) == len(tasks) == 2 * len(ids & {*tasks})


THREE = ["red", "green", "blue"]
OPTIONS = CASES["options"]
"""Options in the layouts of published sets."""


def right_options(name: str, rows: list[Json], path: Path, **settings: Any) -> list[str]:
    """The right option of each row, in words."""
    more = {"video": "v", "context": "a text"}
    rows = [{"question": f"Which is the {n}th?", **more, **row} for n, row in enumerate(rows)]
    write_jsonl(path, rows)
    if name == "video":
        settings |= {"blind": True, "shuffle_options": False}
    right = {}
    for task in made(name, data_path=path, **settings).tasks("train"):
        gold, options = task.hidden.get("answer"), task.public.get("options")
        place = "ABC".index(gold) if isinstance(gold, str) else gold
        right[task.public["question"]] = task.hidden["golds"][0] if not options else options[place]
    return [right[question] for question in sorted(right)]


@pytest.mark.parametrize("name", ["math", "mhqa", "video"])
def test_options_are_read_in_all_layouts_and_counted_as_the_file_counts(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    assert right_options(name, OPTIONS, path) == ["green"] * len(OPTIONS)
    for case, (answers, wanted) in CASES["numbered"].items():
        rows = [{"options": THREE, "answer": answer} for answer in answers]
        assert right_options(name, rows, path) == wanted, case
    rows = [{"options": THREE, "answer": answer} for answer in (1, 2)]
    assert right_options(name, rows, path, first_option=1) == ["red", "green"]


def test_options_may_be_objects_in_lists_of_lists(tmp_path: Path) -> None:
    for nested in CASES["nested_options"]:
        rows = [{"problem": "Which?", "answer_option_list": nested, "answer_value": "B"}]
        for name in ("math", "video"):
            assert right_options(name, rows, tmp_path / "rows.jsonl") == ["green"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", first_of("swe", "math", "tau"))
def test_the_command_that_sample_prints_makes_groups(name: str, tmp_path: Path) -> None:
    wrote = command("sample", name, folder=tmp_path)
    assert wrote.returncode == 0, wrote.stderr
    *files, _, printed = wrote.stdout.splitlines()
    assert files and all((tmp_path / file).is_file() for file in files)
    one = ["--env.total_steps", 1, "--env.group_size", 1]
    one += ["--env.ensure_scores_are_not_same", "false", "--out", "groups.jsonl"]
    ran = command(*shlex.split(printed)[1:], *one, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert len(read_jsonl(tmp_path / "groups.jsonl")) == 1
    again = command("sample", name, folder=tmp_path)
    assert again.returncode == 2 and "exists" in again.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gaia", "kuhn", "proposer_solver", "twenty_questions"])
def test_the_check_of_environments_passes(name: str) -> None:
    """With real workers and scorers, and agents that say what no environment may pay for."""
    assert envserver.main(["check", "--env", name, "--tasks", "12"]) == 0


MOST_PLAYED = {"code": 12, "kuhn": 12, "proposer_solver": 12, "visual_counting": 12}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(name, one, id=f"{name}-{'-'.join(map(str, one.values()))}", marks=marks)
        # mhqa searches on the server where its scope is the corpus
        for name, several in CASES["plays"].items()
        for place, one in enumerate(several)
        for marks in [[pytest.mark.thorough] if name == "swe" and place else []]
    ],
)
async def test_demonstrations_are_paid_and_nobody_is_told_what_is_hidden(
    rooms: Sandboxes, name: str, settings: Json
) -> None:
    environment = made(name, rooms, **settings)
    full = rules_of_rewards(environment).range.solved_at
    decided = set()
    for task in first(environment, most=MOST_PLAYED.get(name, 60)):
        turns = environment.demonstration(task)
        if name == "router":  # an agent that is asked again says the same
            turns = {agent: messages * 4 for agent, messages in turns.items()}
        run = ScriptedRun(turns or (), repeats=name in ("swe", "tau"), rooms=rooms)
        output = await played(environment, task, run)
        if name not in ("kuhn", "router"):  # whose moves and steps are questions of their own
            run.assert_histories_only_grow()
        score = await scored(environment, task, output)
        reward = (score.reward or 0.0) + sum(run.rewards)
        assert name == "kuhn" or reward == pytest.approx(full), (task.id, reward, output)
        assert not any(count for key, count in run.metrics.items() if key.startswith("tool_errors"))
        unsaid = {agent for agent, left in run.left.items() if left}
        told = "\n".join(
            str(message["content"])
            for agent, messages in run.asked
            for message in messages
            if message["role"] != "assistant" and (name, agent) not in HANDED
        )
        secrets = [] if name == "mhqa" else secrets_of(task)
        assert not any(secret in told for secret in secrets), task.id
        match name:
            case "code":
                hidden = {p for t in task.hidden["tests"] for p in calls_in(t, task)}
                assert not [one for one in hidden if one in told and one not in f"{task.public}"]
            case "kuhn":
                assert not output["forfeited"] and sum(score.rewards.values()) == 0
            case "mhqa":
                steps, hops = run.steps, len(task.hidden["decomposition"])
                assert (steps[0], steps[-1]) == ("decompose", "finalize")
                assert steps.count("retrieve") == hops <= steps.count("reason_hop") + 1
                gold = task.hidden["golds"][0]  # not said before anything was found
                before = str(run.asked[0][1]).replace(task.public["question"], "")
                assert gold in SPECIAL or gold not in before, task.id
                supported = settings["mode"] != "tools" or not task.hidden["answerable"]
                assert supported or score.metrics["support_f1"] == 1, task.id
            case "router":
                plan = plan_of(task.hidden["plan"])
                runs = settings.get("execute") and task.hidden["answer"] is not None
                steps = [step.agent for step in plan.in_order()] if runs else []
                assert [agent for agent, _ in run.asked] == ["router", *steps]
                if runs:
                    assert run.steps == ["plan", *["handoff"] * len(plan.payloads), "finalize"]
                # A sub-agent sees its step and what was handed over, not the query.
                assert task.public["query"] not in json.dumps(run.asked[1:])
            case "tau":
                assert (score.error, score.metrics["tool_errors"]) == (None, 0)
                assert (run.steps[0], run.steps[-1]) == ("load_context", "finalize")
                assert {"user", "say"} <= {*run.steps}
                texts = settings.get("protocol") == "text"
                assert (run.fields["agent"].get("tools") is None) == texts
            case "video":
                assert not any(word in f"{run.asked}" for word in ("evidence", "golds", "hidden"))
                decided.add("organizer" in unsaid)
        if name in ("code", "math", "mhqa", "video"):
            assert unsaid <= ({"organizer"} if settings["mode"] == "report" else set())
    if name == "video":  # in a team, the experts agree about some questions
        assert decided == ({True, False} if settings["mode"] == "report" else {False})


HANDED = {("router", agent) for agent in ("math", "code", "search")}
"""Agents that are told a part of the plan."""


def calls_in(test: str, task: Task) -> list[str]:
    """A hidden test of `code`, and the calls in it."""
    return [test, *hoisted(test, task.public["entry_point"]).calls]


class Scorer:
    """Scores in this process."""

    needs_token_ids = False

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    async def score(self, task: Task, result: Result) -> Score:
        try:
            score = self.environment.score(task, result)
            return score if isinstance(score, Score) else await score
        except Exception as error:
            raise ScorerError(f"It raised {error!r}.") from error

    async def score_rows(self, tasks: list[Task]) -> list[RowScore]:
        return row_scores(self.environment, tasks)

    async def task_digests(self, count: int) -> list[str]:
        return [digest_of(task) for task in first(self.environment, most=count)]


CHEATS = CASES["cheats"]
"""How many kinds of results each environment knows at least that must not be paid in full."""
SETTINGS: dict[str, list[Json]] = {
    "mhqa": [{}, {"unanswerable": True}, {"scope": "corpus"}, {"support_weight": 0.25}],
    "router": [{"profile": "graph"}, {"profile": "coursegpt"}, {"execute": True}],
    "tau": [{"task_split": "base", "strict": strict} for strict in (True, False)],
}
GOLD = {("code", None): {"gold", "gold as an answer in full"}, ("tau", True): {"gold"}}
"""All that these pay for."""
MOST_SCORED = {"math": 24, "mhqa": 6, "swe": 1, "tau": 40}


@pytest.mark.parametrize(
    ("name", "settings"),
    [(name, one) for name in NAMES for one in SETTINGS.get(name, [{}])],
    ids=str,
)
async def test_only_what_is_right_is_paid(
    rooms: Sandboxes, monkeypatch: pytest.MonkeyPatch, name: str, settings: Json
) -> None:
    """All that an environment knows of its rewards, and what none may pay for: nothing, noise,
    echoes, orders to a judge."""
    if name == "code":  # two tasks show all kinds of cheats but those that never end
        tried = [(task, dict(cheats_for(task))) for task in first(made(name))]
        assert set().union(*(kinds for _, kinds in tried)) == {*FAST, *SLOW}
        chosen = {next(iter(kinds)): task for task, kinds in tried if not kinds.keys() & {*SLOW}}
        assert set().union(*(dict(cheats_for(task)) for task in chosen.values())) == {*FAST}
        monkeypatch.setattr(find(name), "tasks", lambda self, split: iter(chosen.values()))

    async def play(tasks: list[Task]) -> Plays:
        """Of results that are right, absurd ones are made."""
        if CHEATS.get(name):
            return Plays()
        turns = {task.id: environment.demonstration(task) for task in tasks}
        runs = [(task, ScriptedRun(turns[task.id] or (), rooms=rooms)) for task in tasks]
        return Plays(right={task.id: await played(environment, task, run) for task, run in runs})

    environment = made(name, rooms, **settings)
    most = MOST_SCORED.get(name, 12)
    report = await check(
        lambda: made(name, rooms, **settings),
        Scorer(environment),
        most_tasks=most,
        rows=RowsToCheck(most),
        play=play,
    )
    wrong = [(kind.name, one) for kind in report.kinds for one in kind.wrong]
    if settings.get("unanswerable"):  # "no" is a word of `noanswer`, for its share of the F1 score
        assert {kind for kind, one in wrong if one.reward and one.reward < 0.02} <= {
            "instructions to the judge"
        }
        wrong = []
    assert (report.problems, wrong, report.tasks > 0) == ([], [], True)
    assert not CHEATS.get(name) or report.without_gold == []
    if gold := GOLD.get((name, settings.get("strict"))):
        assert {kind.name for kind in report.kinds if kind.expected_most > 0} == gold
    full = rules_of_rewards(environment).range.solved_at
    known = environment.known_results(next(environment.tasks("train")))
    assert len({one.name for one in known if one.most < full}) >= CHEATS.get(name, 0)
