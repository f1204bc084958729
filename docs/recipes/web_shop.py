"""A web shop without a browser: the agent searches, opens pages and buys, by lines of text.

    envserver process --env docs/recipes/web_shop.py --model sim

The shop is on the server, with a state for each rollout. Only what was bought is paid.
"""

from contextlib import nullcontext

from envserver import Environment, KnownResult, Result, Score, Services, Task

ITEMS = [(k, c, p) for k in ("mug", "lamp", "bag") for c in ("red", "blue") for p in (9, 19, 29)]
HELP = "Write: search WORDS, or open NUMBER, or buy (what is open)."


async def act(arguments, caller):
    """Does what a line says; returns the next page, and what was bought."""
    match arguments["line"].split():
        case ["search", *words]:
            hits = [n for n, item in enumerate(ITEMS) if {*words} <= {*item}]
            return {"page": "\n".join(f"{n}: {ITEMS[n][1]} {ITEMS[n][0]}" for n in hits)}
        case ["open", number] if number in map(str, range(len(ITEMS))):
            caller.state["item"] = item = ITEMS[int(number)]
            return {"page": f"{item[1]} {item[0]}, {item[2]} euros"}
        case ["buy"] if caller.state:
            return {"page": "Thank you.", "bought": caller.state["item"]}
    return {"page": HELP}


class Shop(Environment):
    exact_demonstrations = True  # the simulated engine puts no words before a command

    def tasks(self, split):
        for number, (kind, colour, most) in enumerate(ITEMS):
            asked = f"I want a {colour} {kind} for at most {most} euros. {HELP}"
            yield Task(f"shop-{number}", {"asked": asked}, {"wish": [kind, colour, most]})

    def services(self):
        return nullcontext(Services({"act": act}, state=lambda task: {}))

    async def rollout(self, task, run):
        messages, seen = [{"role": "user", "content": task.public["asked"]}], {}
        while "bought" not in seen:
            messages.append((await run.chat(messages)).message)
            seen = await run.call_tool("act", {"line": messages[-1]["content"]})
            messages.append({"role": "user", "content": seen["page"]})
        return seen["bought"]

    def score(self, task, result):
        *bought, price = result.output if isinstance(result.output, list) else ["nothing", 0]
        *wish, most = task.hidden["wish"]
        return Score(reward=float(bought == wish and price <= most))

    def demonstration(self, task):
        lines = ["search lamp", f"open {ITEMS.index(tuple(task.hidden['wish']))}", "buy"]
        return [{"role": "assistant", "content": line} for line in lines]

    def known_results(self, task):
        yield KnownResult("too dear", Result(output=[*task.hidden["wish"][:2], 99]))
