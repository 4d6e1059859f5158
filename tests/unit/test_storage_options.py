"""What users type behind the question mark of a URL, whatever the scheme."""

from __future__ import annotations

import pytest
from support.refusals import refused

from lightcache import ConfigError
from lightcache.storage import open_storage
from lightcache.storage.disk.backend import parse
from lightcache.storage.stacked import parse as parse_stack
from lightcache.storage.testing.conformance import SPEC
from lightcache.storage.urls import _options, check_url


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("memory:?pages=", "memory: pages: expected a value, found none; leave 'pages=' out"),
        (
            "memory:?pages=-1",
            "memory: pages: expected a number from 0 to 1099511627776, found '-1'",
        ),
        ("memory:?pages=8MiB", "memory: pages: expected a number, found '8MiB'"),
        ("memory:?Pages=8", "memory: expected capacity, pages, found Pages"),
        ("memory:?capacity=8 apples", "memory: capacity: expected bytes or a size such as"),
        ("memory:?pages=1&&capacity=1GiB", "storage: expected options such as name=value&"),
        ("memory:?=1", "storage: expected options such as name=value&"),
        ("memory:?pages=1&pages=2", "storage: expected each option once, found pages twice"),
        ("disk:/x?threads=many", "disk: threads: expected a number, found 'many'"),
        ("disk:/x?threads=257", "disk: threads: expected a number from 1 to 256, found '257'"),
        ("disk:/x?files=0", "disk: files: expected a number from 1 to 1000, found '0'"),
        ("disk:/x?retry=30s", "disk: retry: expected seconds, 0 or more, found '30s'"),
        ("disk:/x?direct=false", "disk: direct: expected yes or no, found 'false'"),
        ("disk:/x?index=", "disk: index: expected a value, found none"),
        ("disk:/x?capacity=0", "disk: capacity: expected more than zero bytes"),
        ("disk:/x?capcity=1TiB", "disk: expected capacity, threads, .*, found capcity"),
        ("disk:?capacity=1TiB", "disk: expected a folder"),
        ("stack:?promote=|memory:|memory:", "stack: promote: expected a value"),
        ("stack:?promote=-1|memory:|memory:", "stack: promote: expected bytes or a size"),
        ("stack:?failures=1.5|memory:|memory:", "stack: failures: expected a number, found '1.5'"),
        ("stack:?retry=inf|memory:|memory:", "stack: retry: expected seconds, 0 or more"),
        ("stack:?missing=Skip|memory:|memory:", "stack: missing: expected raise or skip"),
        ("flaky:delay=1s:memory:", "flaky: delay: expected seconds, 0 or more, found '1s'"),
        ("flaky:hang=nan:memory:", "flaky: hang: expected a number from 0 to 1, found 'nan'"),
        ("flaky:seed=x:memory:", "flaky: seed: expected a number, found 'x'"),
        ("redis://h?password_file=", "redis: password_file: expected a value, found none"),
        ("mooncake://h?metadata=", "mooncake: metadata: expected a value, found none"),
    ],
)
def test_wrong_options_are_refused_with_what_was_expected(url: str, why: str) -> None:
    for opening in (check_url, lambda url: open_storage(url, spec=SPEC)):
        refused(ConfigError, f"^(stack, storage . of ., .*: )?{why}", opening, url)


def test_what_is_not_said_is_left_to_the_storage() -> None:
    assert parse("/x", {}) == {"direct": True, "persistent": False}
    assert parse_stack({}) == {"skip": False}
    assert parse_stack({"promote": "0"}) == parse_stack({"promote": "no"})


def test_what_is_said_arrives() -> None:
    options = {"capacity": "1KiB", "threads": "3", "files": "2", "retry": "0", "direct": "no"}
    assert parse("/x", {**options, "index": "keep"}) == {
        "capacity": 1024,
        "threads": 3,
        "files": 2,
        "retry": 0.0,
        "direct": False,
        "persistent": True,
    }


def test_a_plus_is_a_plus() -> None:
    assert _options("ca=/a+b%20c%2B%26&key=x=y", "&") == {"ca": "/a+b c+&", "key": "x=y"}
