"""Reads trajectories that any agent wrote, makes them unified trajectories, validates them."""
