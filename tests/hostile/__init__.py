"""Small hostile programs, what must happen to each, and the host that judges them."""
