"""Commands in the folder of a test."""

from support.in_process import run as run
