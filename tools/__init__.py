"""The command line: create ls dump check repair reap rm enable disable doctor bench demo.

click and rich are imported only here, and only when a command runs.
"""
