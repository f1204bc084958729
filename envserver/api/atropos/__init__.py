"""The Atropos wire, as their trainers and environments speak it, over the durable store."""
