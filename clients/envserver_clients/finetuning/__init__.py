"""The parts of `envserver_clients.sft` and `envserver_clients.dpo`: TRL trainers on exports.

    settings      what both commands share: settings, errors, exit status
    data          files and folders -> parts (one model each), rows, their digest
    conversation  a row -> the messages of a conversation, or a plain prompt and its completion
    tokens        a conversation -> token ids and which of them are trained, by any chat template
    examples      rows -> the trainer's data set, within limits; left out rows are counted
    trainers      settings -> TRL's SFTTrainer and DPOTrainer
    heldout       perplexity, and how good turns and tool calls are, on held-out rows
    runs          one training: its folder, checkpoints, resuming, progress and results
    card          README.md for the hub

`settings`, `data`, `conversation` and `card` do not import torch.
"""
