"""The parts of the trainer in `envserver_clients.grpo`.

    settings      the trainer's settings
    sources       batches of groups, over the native or the Atropos wire, acknowledged when saved
    advantages    rewards of a group -> advantages of its rows, within each agent
    examples      rows of a batch -> examples with weights that add up -> padded arrays
    objectives    the loss's settings, and presets of them by name
    loss          clipped importance weights, from the logprobs that were delivered
    policy        the model: loading, LoRA, saving for an engine
    learner       one optimizer step from one batch
    checkpoints   everything needed to continue, in folders that are always complete
    publishing    new weights to the engine, the new version to the server
    metrics       one line per step: console, JSONL, trackers
    curves        metrics.jsonl -> curves.png

`advantages` and `examples` need only numpy; the rest imports torch where it computes.
"""
