"""Models that scorers ask: the way to them, and judges made of them. See README.md."""
