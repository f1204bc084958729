"""The declaration of each command: its name, summary, settings and frequent settings.

`specs/X.py` declares what `cli/X.py` runs. Help and completion read only the declaration, so these
modules import the settings but not the code that does the work.
"""
