"""A judge: a second model marks what no program can check, and a program checks the rest.

    envserver process --env docs/recipes/judge.py --model sim \\
      --judge.base_url https://api.example/v1 --judge.model_name NAME

Its key is a variable of the server, ENVSERVER_JUDGE__API_KEY. It marks two criteria from 0 to 1;
length is counted by the program, so that a long answer cannot buy marks. If the judge fails, the
rollout is scored again or dropped; it never gets 0.
"""

from envserver import Environment, KnownResult, Result, Score, Task, rubric_marks

CRITERIA = {
    "right": "The explanation agrees with the reference.",
    "simple": "A ten-year-old understands every word.",
}
QUESTIONS = {
    "Why is the sky blue?": "Air scatters blue light more than red light.",
    "Why do we see lightning before thunder?": "Light is faster than sound.",
    "Why does ice float on water?": "Ice is lighter than the same amount of water.",
}


class Explain(Environment):
    """Explain a fact to a child, in at most 60 words."""

    component_weights = {"right": 0.7, "simple": 0.3}
    solved_at = 0.8

    def tasks(self, split):
        for number, (question, reference) in enumerate(QUESTIONS.items()):
            yield Task(f"why-{number}", {"question": question}, {"reference": reference})

    async def rollout(self, task, run):
        asked = f"{task.public['question']} Explain it to a child, in at most 60 words."
        return (await run.chat([{"role": "user", "content": asked}])).content

    async def score(self, task, result):
        answer = result.output or ""  # None when a limit ended the rollout
        if not 0 < len(answer.split()) <= 60:
            return Score(reward=0.0)  # no judge is paid for it
        marks = await rubric_marks(
            self.judge,
            question=task.public["question"],
            answer=answer,
            criteria=CRITERIA,
            reference=task.hidden["reference"],
        )
        return Score(components=marks)

    def demonstration(self, task):
        return [{"role": "assistant", "content": task.hidden["reference"]}]

    def known_results(self, task):
        yield KnownResult("too long", Result(output=task.hidden["reference"] + " very" * 60))
        yield KnownResult("nothing", Result(output=""))
