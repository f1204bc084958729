"""The parts of the trainer in `envserver_clients.grpo`: what is computed, and what is kept.

    settings      what may be set
    sources       batches of groups, over the native wire or Atropos's, acknowledged when kept
    advantages    rewards of a group -> how much better than its mates each trajectory was
    examples      rows of a batch -> what is learned from, with weights that add up
    padding       examples -> padded arrays, a few rows at a time
    loss          clipped importance weights, from the logprobs that were delivered
    policy        the model: loading, LoRA, saving for an engine
    learner       one optimizer step from one batch
    checkpoints   all that is needed to go on, in one folder that is there whole or not at all
    publishing    new weights to the engine, new version to the server
    metrics       one line a step: console, JSONL, TensorBoard, trackio, W&B
    curves        metrics.jsonl -> curves.png

`advantages`, `examples` and `padding` need numpy alone; the rest imports torch where it computes.
"""
