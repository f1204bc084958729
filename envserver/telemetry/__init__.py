"""What a person who runs the server can see of it: numbers, traces, log lines.

In flows what the parts count and time; out flow metrics, spans, lines. What always holds: nothing
here holds a prompt, an answer or a secret, no label has values without bound, and what is switched
off costs next to nothing. The names are listed in README.md beside this file.
"""
