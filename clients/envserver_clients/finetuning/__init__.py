"""The parts of `envserver_clients.sft` and `envserver_clients.dpo`: TRL's trainers on what
`envserver` wrote.

    settings      what may be set, its defaults, and configs/trl_defaults.yaml
    data          files and folders -> parts (one model each), rows, their digest
    conversation  a row -> the messages of a conversation, or a plain prompt and its completion
    tokens        a conversation -> token ids and which of them are trained, by any chat template
    examples      rows -> the trainer's data set: limits kept, what was left out counted
    trainers      settings -> TRL's SFTTrainer and DPOTrainer
    runs          one training: its folder, checkpoints, going on, and what is left at the end
    reporting     metrics.jsonl and a progress bar
    card          README.md for the hub
    command       the life of both commands

`settings`, `data`, `conversation` and `card` import no torch.
"""
