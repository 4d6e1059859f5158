"""Every row of the tables in tests/refusals: the error is raised and says these words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from refusals import index as index_rows
from support.refusals import Refusal

from lightcache import PageIndex

ROWS = index_rows.ROWS


@pytest.fixture
def index(segment_name: str) -> Iterator[PageIndex]:
    with PageIndex.create(segment_name, pages=8) as made:
        made.reserve(index_rows.A).publish()
        yield made


@pytest.fixture
def other(index: PageIndex) -> Iterator[PageIndex]:
    with PageIndex.attach(index.name, lock_timeout=0.01) as attached:
        yield attached


@pytest.fixture
def reader(index: PageIndex) -> Iterator[PageIndex]:
    with PageIndex.attach(index.name, readonly=True) as attached:
        yield attached


@pytest.fixture
def small(segment_name: str) -> Iterator[PageIndex]:
    """Two of its four pages have memory."""
    with PageIndex.create(f"{segment_name}-small", pages=4, grown=2) as made:
        yield made


@pytest.fixture
def locked(index: PageIndex, other: PageIndex) -> Iterator[PageIndex]:
    """A client that waits 10 ms for the lock, which another one holds."""
    assert index.core.locked("lci_hold", what="test") == 0
    yield other
    index.core.quick.lci_let_go(index.core.handle)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.documented)
def test_refused(request: pytest.FixtureRequest, row: Refusal) -> None:
    fixtures = {name: request.getfixturevalue(name) for name in row.fixtures()}
    with pytest.raises(row.error, match=row.words) as caught:
        row.call(**fixtures)
    assert type(caught.value) is row.error
