"""Adapters with which other trainers get rollouts from a server; the README shows how for each."""
