"""SQL: the agent explores a database with a tool; its final query is judged on other rows.

    envserver process --env docs/recipes/sql.py --model sim

The scorer runs the query on other rows, so writing the answer down is not paid. A query can only
read, with little time and memory.
"""

import random
import sqlite3

from envserver import Environment, KnownResult, Result, Score, Task, ToolError, tool

CITIES = ("Oslo", "Rome", "Lima")
READ = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}


def first_row(query, seed):
    base, prices = sqlite3.connect(":memory:"), random.Random(seed).sample(range(1000), 9)
    base.execute("CREATE TABLE orders (city TEXT, price INTEGER)")
    base.executemany("INSERT INTO orders VALUES (?, ?)", zip(CITIES * 3, prices, strict=True))
    base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000)
    base.set_authorizer(lambda action, *_: int(action not in READ))  # 0 allows, 1 refuses
    base.set_progress_handler(lambda: 1, 1_000_000)
    try:
        return base.execute(query).fetchone()
    except (sqlite3.Error, sqlite3.Warning) as error:
        return error


class Orders(Environment):
    """Write a query."""

    exact_demonstrations = True  # the simulated engine puts no words before a query

    def tasks(self, split):
        for city in CITIES:
            query = f"SELECT sum(price) FROM orders WHERE city = '{city}'"
            yield Task(city, {"question": f"How much was spent in {city}?"}, {"query": query})

    @tool
    def query(self, sql: str) -> str:
        """Returns the first row of a query on `orders (city, price)`. Answer with a query."""
        if isinstance(row := first_row(sql, seed=0), Exception):
            raise ToolError(str(row))  # which the model reads
        return str(row)

    async def rollout(self, task, run):
        return (await run.loop([{"role": "user", "content": task.public["question"]}])).text

    def score(self, task, result):
        said, right = first_row(result.output or "", 1), first_row(task.hidden["query"], 1)
        return Score(reward=float(said == right))

    def demonstration(self, task):
        return [{"role": "assistant", "content": task.hidden["query"]}]

    def known_results(self, task):
        yield KnownResult("a number, not a query", Result(output="SELECT 712"))
