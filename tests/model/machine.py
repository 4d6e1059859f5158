"""The model and the real index take the same random calls; after each they are compared."""

from __future__ import annotations

from model.agreement import Agreement
from model.clients import ClientRules
from model.endings import EndingRules
from model.handing import TicketRules
from model.lookups import LookupRules
from model.room import RoomRules
from model.writing import WritingRules


class IndexMachine(
    ClientRules, LookupRules, EndingRules, WritingRules, TicketRules, RoomRules, Agreement
):
    """All rules together, each subject in a file of its own."""
