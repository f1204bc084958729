"""The Atropos protocol over the durable store, for existing Atropos trainers and environments."""
