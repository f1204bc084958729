"""Rewards of a conversation: tau2-bench's, and a stricter one."""
