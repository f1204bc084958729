"""Conversations with tools and a (simulated) customer: tau2-bench's domains and rules, rebuilt."""
