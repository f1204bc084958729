"""Questions whose answers need several facts, found one after the other."""
