"""HTTP without its routes: the server and its limits, access, bodies, answers, health."""
