"""The parts of `envserver_clients.sft` and `envserver_clients.dpo`: TRL trainers on exports.

    settings      the commands' settings, defaults, and configs/trl_defaults.yaml
    data          files and folders -> parts (one model each), rows, their digest
    conversation  a row -> the messages of a conversation, or a plain prompt and its completion
    tokens        a conversation -> token ids and which of them are trained, by any chat template
    examples      rows -> the trainer's data set, within limits; left out rows are counted
    trainers      settings -> TRL's SFTTrainer and DPOTrainer
    runs          one training: its folder, checkpoints, resuming, and results
    reporting     metrics.jsonl and a progress bar
    card          README.md for the hub
    command       what both commands share

`settings`, `data`, `conversation` and `card` do not import torch.
"""
