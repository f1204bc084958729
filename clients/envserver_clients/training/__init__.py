"""The parts of the trainer in `envserver_clients.grpo`; README.md describes each.

`advantages` and `examples` need only numpy; the rest imports torch where it computes.
"""
