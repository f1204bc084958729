"""Kuhn poker: two agents of one model against each other, with known equilibria."""
