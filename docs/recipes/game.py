"""A game: the board is on the server, and the agent's process sees only what a player may see.

    envserver process --env docs/recipes/game.py --model sim

In Nim two players take stones in turn. `Services` makes one pile for each rollout, and the server
plays the other side well: it never gives a win back.
"""

from contextlib import nullcontext

from envserver import Environment, InputError, KnownResult, Result, Score, Services, Task

RULES = "We take 1 to 3 stones in turn; the last stone wins. Answer with a number. Stones left: "


async def take(arguments, caller):
    """Takes the agent's stones, then the server's; returns what the agent may see."""
    pile, count = caller.state, arguments["count"]
    if count not in ("1", "2", "3") or int(count) > pile["stones"]:
        raise InputError("Take 1 to 3 stones.")
    left = pile["stones"] - int(count)
    pile["stones"] = left - (left % 4 or min(1, left))
    return {"left": pile["stones"], "won": left == 0}


class Nim(Environment):
    """Win at Nim."""

    exact_demonstrations = True  # the simulated engine puts no words before a move

    def tasks(self, split):
        for number in range(15):
            yield Task(f"nim-{number}", {"stones": 5 + number + number // 3})  # no multiple of 4

    def services(self):
        return nullcontext(Services({"take": take}, state=lambda task: {**task.public}))

    async def rollout(self, task, run):
        seen, messages = {"left": task.public["stones"], "won": False}, []
        while seen["left"]:
            messages.append({"role": "user", "content": f"{RULES}{seen['left']}"})
            messages.append((await run.chat(messages)).message)
            try:
                seen = await run.call_tool("take", {"count": messages[-1]["content"].strip()})
            except InputError:  # who makes no legal move loses
                break
        return "won" if seen["won"] else "lost"

    def score(self, task, result):
        return Score(reward=float(result.output == "won"))

    def demonstration(self, task):
        moves = [str(task.public["stones"] % 4)] + ["3"] * (task.public["stones"] // 4)
        return [{"role": "assistant", "content": move} for move in moves]

    def known_results(self, task):
        yield KnownResult("lost", Result(output="lost"))
