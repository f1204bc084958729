"""Has the name of a module of the standard library, whose users must not get this one."""

import random

assert random.__name__ == "random"
ADDED = 7
