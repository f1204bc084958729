"""A phone company: its customers' accounts on one side, a customer's own phone on the other."""
