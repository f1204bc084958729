"""Several agents: a solver and a critic, each with training rows and a reward of its own.

    envserver process --env docs/recipes/multi_agent.py --model sim
    ... --env.agents.critic.trained false          # only the solver learns
    ... --env.agents.critic.model_name big-model   # the critic is another model

The solver is paid for a right final answer, the critic for a right verdict on the first one. So a
critic that always agrees is paid only where the solver was right at once.
"""

import random

from envserver import AgentRole, Environment, KnownResult, Result, Score, Task


class Review(Environment):
    """Add three numbers; the other agent says `right` or `wrong`; then answer finally."""

    exact_demonstrations = True  # an answer is one word

    def agents(self):
        return {"solver": AgentRole(), "critic": AgentRole()}  # the first one is the main agent

    def tasks(self, split):
        rng = random.Random(f"review-{self.config.seed}-{split}")
        for number in range(500):
            numbers = [rng.randrange(10, 100) for _ in range(3)]
            asked = {"question": f"{' + '.join(map(str, numbers))} = ? Answer with the number."}
            yield Task(f"sum-{number}", asked, {"answer": str(sum(numbers))})

    async def rollout(self, task, run):
        talk = [{"role": "user", "content": task.public["question"]}]
        first = await run.chat(talk, agent="solver")
        asked = f"{task.public['question']}\nThe answer was: {first.content}\nSay right or wrong."
        verdict = await run.chat([{"role": "user", "content": asked}], agent="critic")
        told = f"A critic says: {verdict.content}. Your final answer?"
        talk += [first.message, {"role": "user", "content": told}]
        final = await run.chat(talk, agent="solver")
        said = {"first": first, "verdict": verdict, "final": final}
        return {name: reply.content.strip() for name, reply in said.items()}

    def score(self, task, result):
        said = result.output if isinstance(result.output, dict) else {}
        answer = task.hidden["answer"]
        judged = said.get("verdict") == ("right" if said.get("first") == answer else "wrong")
        solved = said.get("final") == answer
        return Score(rewards={"solver": float(solved), "critic": float(judged)})

    def demonstration(self, task):
        said = {"role": "assistant", "content": task.hidden["answer"]}
        return {"solver": [said, said], "critic": [{"role": "assistant", "content": "right"}]}

    def known_results(self, task):
        wrong = {"first": "-1", "verdict": "right", "final": "-1"}
        yield KnownResult("both are wrong", Result(output=wrong))
        half = Result(output={**wrong, "verdict": "wrong"})
        yield KnownResult("only the critic is right", half, 0.5, 0.5)
