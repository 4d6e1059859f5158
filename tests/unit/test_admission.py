"""Pages that are not worth writing, and hints of what is to come, in an index that has learned that
some prompts come again and others do not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from support.keys import Keys, array, prompt
from support.learned_traffic import KNOWN, PAGES, PROMPT, Traffic, taught
from support.refusals import refused

from lightcache import Abandoned, ConfigError, PageIndex, PermissionDenied
from lightcache.layout import Hint, WhyMissing
from lightcache.runs import PLAIN, Run


@pytest.fixture
def traffic(segment_name: str) -> Iterator[Traffic]:
    with PageIndex.create(segment_name, pages=PAGES, eviction="hz") as index:
        yield taught(index)
        index.set_clock(None)
        report = index.check()
        assert report.clean, report.message


def test_a_page_goes_for_none_that_ranks_below_it(traffic: Traffic) -> None:
    index = traffic.index
    keys = traffic.once()
    # The six of a prompt that came once rank below what comes now: only they go.
    assert traffic.request(keys, admission=True) == (0, 6, WhyMissing.WORTH)
    with index.reserve(traffic.once(), admission=True) as new:
        assert (len(new.new), new.missing.tolist()) == (6, [6, 7, 8, 9])
        assert "not worth writing" in new.why
    assert [found for found, _, _ in traffic.known()] == [PROMPT] * KNOWN


def test_without_the_option_known_pages_go(traffic: Traffic) -> None:
    assert traffic.request(traffic.once()) == (0, PROMPT, WhyMissing.NONE)
    assert sum(traffic.index.peek(prompt(name, PROMPT)) for name in range(KNOWN)) < KNOWN * PROMPT


def test_what_is_asked_for_again_is_written(traffic: Traffic) -> None:
    """Pages that were not made are remembered."""
    keys, answers = traffic.once(), []
    for _ in range(20):
        answers.append(traffic.request(keys, admission=True))
        traffic.known()
    assert answers[0][2] is WhyMissing.WORTH
    assert answers[-1][0] == PROMPT


def test_free_pages_are_given(traffic: Traffic) -> None:
    index = traffic.index
    assert index.drop(prompt(0, PROMPT)[7:]) == 3
    with index.reserve(traffic.once(), admission=True) as new:
        assert len(new.new) == 6 + 3


def test_promised_pages_are_given(traffic: Traffic) -> None:
    index = traffic.index
    mine = index.namespace("mine", minimum_pages=8)
    with index.reserve(traffic.once(), admission=True, namespace=mine) as new:
        assert (len(new.new), new.why_missing) == (8, WhyMissing.WORTH)
    assert index.worth(traffic.once(), namespace=mine) == 8
    index.namespace("mine", minimum_pages=0)
    with index.reserve(traffic.once(), admission=True, namespace=mine) as new:
        assert len(new.new) == 8  # which are free now


def test_pages_of_a_group_that_was_promised_are_given(traffic: Traffic) -> None:
    index, states = traffic.index, Run(1, 1)
    used = states.keys(traffic.once())
    for _ in range(6):
        traffic.request(used, independent=True, run=states)
        traffic.known()
    with index.reserve(traffic.once(), admission=True) as new:
        assert len(new.new) == 0
    assert {group.number: group.pages for group in index.groups()}[0] == PAGES - PROMPT
    index.set_minimum(PLAIN, PAGES - PROMPT + 5)
    assert index.worth(traffic.once()) == 5
    with index.reserve(traffic.once(), admission=True) as new:
        assert (len(new.new), new.why_missing) == (5, WhyMissing.WORTH)


def test_what_a_ready_page_hangs_on_is_written(traffic: Traffic) -> None:
    index = traffic.index
    keys = array([*map(tuple, traffic.once().tolist()), tuple(prompt(0, 1)[0].tolist())])
    assert index.worth(keys) == PROMPT + 1
    with index.reserve(keys, admission=True) as new:
        assert (len(new.new), len(new.present)) == (PROMPT, 1)


def test_the_rest_of_a_prompt_that_was_not_written_is_not(traffic: Traffic) -> None:
    index, keys = traffic.index, traffic.once()
    index.drop(prompt(0, PROMPT)[5:])  # there are free pages
    with index.reserve(keys, 4, admission=True) as new:
        assert (len(new.missing), new.why_missing) == (6, WhyMissing.HEAD)
    with index.reserve(keys, 4) as new:
        assert len(new.new) == 6


def test_with_lru_all_are_written(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=PAGES, eviction="lru") as index:
        traffic = taught(index)
        keys = traffic.once()
        assert index.worth(keys) == PROMPT
        assert traffic.request(keys, admission=True) == (0, PROMPT, WhyMissing.NONE)
        with index.reserve(traffic.once(), 4, admission=True) as new:
            assert len(new.new) == 6


def test_a_namespace_at_its_quota_is_compared_with_its_own(traffic: Traffic) -> None:
    index = traffic.index
    other = index.namespace("other", quota_pages=PROMPT)
    own = traffic.once()
    for _ in range(6):
        traffic.request(own, namespace=other)
        traffic.known()
    keys = traffic.once()
    assert index.worth(keys, namespace=other) == 0
    with index.reserve(keys, admission=True, namespace=other) as new:
        assert (len(new.new), new.why_missing) == (0, WhyMissing.WORTH)
    assert index.peek(own, namespace=other) == PROMPT
    index.namespace("other", quota_pages=PROMPT + 2)
    with index.reserve(keys, admission=True, namespace=other) as new:
        assert len(new.new) <= 2


def test_nothing_goes_for_what_is_refused(traffic: Traffic) -> None:
    index = traffic.index
    traffic.request(traffic.once(), admission=True)  # the six that rank below it
    traffic.known()
    for name in range(KNOWN):
        traffic.request(prompt(name, PROMPT + 1))
    ready = index.stats().ready
    with index.reserve(traffic.once(), admission=True) as new:
        made = len(new.new)
        assert made < PROMPT
        assert index.stats().ready == ready - made


def test_ranks_are_told_by_one_that_asks(traffic: Traffic) -> None:
    index = traffic.index
    keys = traffic.once()
    worth = index.worth(keys, hint=Hint.ENDS)
    assert worth in range(PROMPT + 1)
    assert index.worth(keys, 4, refused=True) == 0
    assert index.worth(keys[:0]) == 0
    known = prompt(0, PROMPT)
    assert index.worth(known) == PROMPT
    index.drop(known[5:])
    assert index.worth(traffic.once()) >= 5  # as many are free


def test_what_one_that_asks_was_denied_is_remembered(traffic: Traffic) -> None:
    keys, worth = traffic.once(), []
    for _ in range(20):
        traffic.tick()
        worth.append(traffic.index.worth(keys))
        traffic.known()
    assert worth[-1] == PROMPT


def test_bad_calls(traffic: Traffic) -> None:
    index, keys = traffic.index, traffic.once()
    for more in ({"team": 3, "shard": 0, "shards": 2}, {"run": Run(1, 2), "independent": True}):
        refused(ConfigError, "ask `worth` once", index.reserve, keys, admission=True, **more)
    for bad in (4, -1, "ends", None):
        refused(
            ConfigError, r"hint: expected one of Hint.NONE.*found", index.reserve, keys, hint=bad
        )
        refused(ConfigError, r"hint: expected one of", index.worth, keys, hint=bad)
    refused(ConfigError, "start", index.worth, keys, 11)
    with PageIndex.attach(index.name, readonly=True) as reader:
        refused(PermissionDenied, "", reader.worth, keys)
    gone = index.namespace("gone")
    index.clear(gone)
    refused(Abandoned, "", index.worth, keys, namespace=gone)


# ---- Hints


def hits(name: str, hint: Callable[[bool, random.Random], Hint]) -> int:
    """Pages found, of prompts of which each second one comes again, 24 prompts later."""
    draws = random.Random(3)
    with PageIndex.create(name, pages=150, eviction="hz") as index:
        traffic, found = Traffic(index), 0
        waiting: list[Keys] = []
        for number in range(900):
            again, keys = draws.random() < 0.5, traffic.once()
            traffic.request(keys, hint=hint(again, draws))
            waiting.append(keys if again else keys[:0])
            if number >= 24 and len(back := waiting[number - 24]):
                found += traffic.request(back)[0]
        return found


def test_what_a_hint_is_worth_is_learned(segment_name: str) -> None:
    """Also of one that says the opposite of what comes; and one that says nothing costs little."""
    none = hits(segment_name, lambda again, draws: Hint.NONE)
    right = hits(segment_name, lambda again, draws: Hint.CONTINUES if again else Hint.ENDS)
    false = hits(segment_name, lambda again, draws: Hint.ENDS if again else Hint.TOOL_CALL)
    coin = hits(segment_name, lambda again, draws: draws.choice([Hint.CONTINUES, Hint.ENDS]))
    assert min(right, false) > 1.3 * none
    assert coin > 0.9 * none
