"""The declaration of each command: its name, summary, settings and frequent settings.

`specs/X.py` declares what `cli/X.py` runs. Help and completion read only the declaration, so these
modules import settings and nothing that does the work.
"""
