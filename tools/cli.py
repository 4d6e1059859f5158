"""Placeholder until the commands are there."""


def main() -> None:
    """Entry point of `lightcache`."""


def shm_dump() -> None:
    """Entry point of `shm-dump`."""
