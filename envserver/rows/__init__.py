"""Environments made of rows and reward functions: a table, a column to ask, a function to score."""
