"""`envserver lm-eval`: the real lm-evaluation-harness asks our endpoint, in a task of our own."""

import subprocess
from email.message import Message
from pathlib import Path

import orjson
import pytest
from support.commands import envserver
from support.http_stand_in import standing_in

ENVIRONMENT = """
from envserver import Environment, Score, Task

class Texts(Environment):
    def tasks(self, split):
        for n in range(4):
            yield Task(f"t-{n}", {"question": f"What is {n} + {n}?"}, {"answer": str(2 * n)})

    async def rollout(self, task, run):
        return (await run.chat([{"role": "user", "content": task.public["question"]}])).content

    def score(self, task, result):
        return Score(reward=float(task.hidden["answer"] in str(result.output)))
"""
DOCUMENTS = 12
MODEL = {"id": "sums-model", "object": "model"}


class Sums:
    """An OpenAI-compatible engine: right of even numbers, wordily of every third."""

    def __init__(self) -> None:
        self.asked = 0
        self.keys: set[str | None] = set()

    def answer(self, path: str, headers: Message, content: bytes) -> tuple[int, bytes]:
        if not content:
            return 200, orjson.dumps({"object": "list", "data": [MODEL]})
        body = orjson.loads(content)
        self.asked += 1
        self.keys.add(headers["authorization"])
        number = int(body["messages"][-1]["content"].split()[2])
        answer = str(2 * number + number % 2)
        message = {"role": "assistant", "content": f"It is {answer}" if number % 3 == 0 else answer}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
        told = {"id": "x", "model": body["model"], "choices": [choice], "usage": usage}
        return 200, orjson.dumps(told)


def with_sums(learn_python: Path, folder: Path) -> None:
    """Writes a task of the harness into `folder`, which needs no network."""
    has = "import importlib.util as u; raise SystemExit(u.find_spec('lm_eval') is None)"
    if subprocess.run([learn_python, "-c", has], check=False).returncode:
        pytest.skip("lm-evaluation-harness is missing: pip install 'lm-eval[api]'")
    sums = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(DOCUMENTS)]
    (folder / "tasks").mkdir()
    data = folder / "tasks" / "sums.jsonl"
    data.write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in sums))
    task = Path(__file__).with_name("harness_task.yaml.txt").read_text()
    (folder / "tasks" / "sums.yaml").write_text(task.format(data=data))


@pytest.mark.slow
def test_what_is_asked_as_text_needs_no_tokenizer(learn_python: Path, tmp_path: Path) -> None:
    with_sums(learn_python, tmp_path)
    words = ["lm-eval", "sums", "--model", "sim", "--api", "completions", "--out", "run"]
    words += ["--include_path", "tasks", "--num_fewshot", "0", "--python", str(learn_python)]
    ran = envserver(*words, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    report = orjson.loads((tmp_path / "run" / "report.json").read_bytes())
    assert report["env"] == "sums" and report["run"]["overall"]["rollouts"] == DOCUMENTS
    assert "exact_match,whole" in report["harness"]["values"]


@pytest.mark.slow
def test_tasks_of_the_harness_stand_in_a_report(learn_python: Path, tmp_path: Path) -> None:
    with_sums(learn_python, tmp_path)
    (tmp_path / "texts.py").write_text(ENVIRONMENT)
    server = Sums()
    with standing_in(server.answer) as url:
        engine = ["--openai.base_url", f"{url}/v1", "--openai.server_type", "openai"]
        engine += ["--openai.api_key", "sk-secret", "--out", "run", "--prices.prompt", "1"]
        engine += ["--prices.completion", "2"]
        words = ["--env.group_size", "1", "--workers.processes", "1"]
        made = envserver("evaluate", "--env", "texts.py", *words, *engine, folder=tmp_path)
        assert made.returncode == 0, made.stderr
        assert server.asked == 4
        words = ["lm-eval", "sums", *engine, "--include_path", "tasks", "--num_fewshot", "0"]
        words += ["--python", str(learn_python)]
        ran = envserver(*words, folder=tmp_path)
        assert ran.returncode == 0, ran.stderr
        assert server.asked == 4 + DOCUMENTS and server.keys == {"Bearer sk-secret"}
        refused = envserver(*words, folder=tmp_path)
        assert refused.returncode == 2 and "run has sums" in refused.stderr
        again = envserver(*words, "--resume", "--metric", "exact_match,whole", folder=tmp_path)
        assert again.returncode == 0, again.stderr
        assert server.asked == 4 + DOCUMENTS  # every answer was there
    texts, part = orjson.loads((tmp_path / "run" / "report.json").read_bytes())["parts"]
    assert (texts["name"], part["name"]) == ("texts", "sums")
    values = part["harness"]["values"]
    assert values["exact_match,number"] == pytest.approx(0.5)
    assert values["exact_match,whole"] == pytest.approx(1 / 3)
    mean = part["run"]["overall"]["mean_reward"]["value"]
    assert (mean, part["harness"]["filter"]) == (pytest.approx(1 / 3), "whole")
    costs = part["run"]["costs"]
    assert (costs["total_prompt_tokens"], costs["total_completion_tokens"]) == (120, 36)
    assert costs["total_cost"] == pytest.approx((120 + 72) / 1e6)
    assert part["model"] == "sums-model" and part["harness"]["task_version"] == "2.0"
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"sk-secret" not in everything
    assert "lm-evaluation-harness" in (tmp_path / "run" / "report.html").read_text()
