"""The parts of `envserver_clients.sft` and `envserver_clients.dpo`: TRL trainers on exports.

`settings`, `conversation` and `card` do not import torch.
"""
