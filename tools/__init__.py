"""The command line: create ls top dump check repair reap rm disable enable sweep doctor demo bench.

click and rich are imported only in here. `cli` has the entry points and loads a command's module
when the command runs.
"""
