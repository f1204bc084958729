"""Schedules rollouts, retries failures, scores results and delivers groups."""
