"""Composition: assembles engine, proxy, workers, scorers, store and API, and runs them."""
