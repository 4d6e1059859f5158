"""What a server says when it will not, and what to do about it."""

from __future__ import annotations

from lightcache.errors import StorageError

_REMEDIES = {
    "OOM": "it is full: raise maxmemory, or set maxmemory-policy allkeys-lru",
    "READONLY": "it is a replica: give the address of the primary",
    "LOADING": "it reads its data from disk; try again when it has",
    "NOAUTH": "give user and password: redis://user:password@host",
    "WRONGPASS": "correct user or password",
    "NOPERM": "allow this user the keys lightcache/* and the commands of docs/storage.md",
    "MISCONF": "it cannot save its data and takes no writes: see its log; a cache needs no saving",
    "MASTERDOWN": "it is a replica without its primary: give the address of the primary",
    "MOVED": "it is a node of a cluster, which is not supported: give one server",
    "ASK": "it is a node of a cluster, which is not supported: give one server",
    "CROSSSLOT": "it is a node of a cluster, which is not supported: give one server",
    "CLUSTERDOWN": "it is a node of a cluster, which is not supported: give one server",
    "BUSY": "it runs a script; stop that, or wait for it",
    "ERR max number of clients": "raise maxclients, or have fewer connections=",
    "ERR unknown command": "lightcache needs Redis 6.2 or Valkey, with that command",
    "ERR Protocol error: invalid bulk length": "raise proto-max-bulk-len above the size of a page",
    "ERR DB index is out of range": "give the number of a database that there is",
    "ERR AUTH": "it wants no password: leave it out",
    "-DENIED": "it is in protected mode: set a password, or bind it to the address that is meant",
    "DENIED": "it is in protected mode: set a password, or bind it to the address that is meant",
}


class ServerError(StorageError):
    """The server answered with an error."""

    def __init__(self, server: str, words: str) -> None:
        """
        Args:
            server: what errors call it.
            words: its own.
        """
        self.words = words
        remedy = next((do for what, do in _REMEDIES.items() if words.startswith(what)), "")
        super().__init__(f"{server}: {words}{'; ' + remedy if remedy else ''}")

    @property
    def kind(self) -> str:
        """The first word, which says which error it is."""
        return self.words.partition(" ")[0]


__all__ = ["ServerError"]
