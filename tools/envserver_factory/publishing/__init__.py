"""Copies a finished folder to another folder, a bucket or the hub; writes the hub's data card."""
