"""Writes delivered groups to files for people and offline training."""
