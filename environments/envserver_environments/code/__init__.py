"""Programming: write a Python function that passes tests, half of which are hidden."""
