"""Composition: puts engine, proxy, workers, scorers, store and API together, and runs them."""
