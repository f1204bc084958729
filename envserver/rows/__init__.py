"""Environments made of rows and reward functions: a table, a column to ask, a function to score.

    Sums = Environment.from_rows("sums.jsonl", prompt="question", reward=exact)
    envserver process --env sums.jsonl --env.prompt question --env.reward my_rewards.py:exact

In: a file of rows (or a list, or a data set on the hub) and reward functions as TRL and verifiers
have them. Out: an Environment class. A row that makes no task is named with its place and counted;
it is an error unless the settings say that such rows are left out.
"""
