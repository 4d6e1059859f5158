"""Tools for testing storages: the conformance suite, and a storage that fails on purpose.

`conformance.CHECKS` is what every backend must pass. `FlakyStorage`, or a URL that begins with
"flaky:", wraps another storage and injects faults.
"""

from lightcache.storage.testing.conformance import CHECKS
from lightcache.storage.testing.faults import Fault, FlakyStorage, Rates

__all__ = ["CHECKS", "Fault", "FlakyStorage", "Rates"]
