"""The generator of mutants misses nothing, and a mutant of each main kind is killed.

All of them take too long for this: `make mutants`.
"""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path

import pytest
from mutants import models
from mutants.build import ROOT, Workshop, run
from mutants.csource import CSource
from mutants.mutate import Mutant, mutants, sources
from mutants.run import STAGES, Stage, accepted, try_one
from support.packages import need

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the first builds all of it

OWN_STAGES = [stage for stage in STAGES if stage.name not in ("core_tests", "stress")]
CHANGES = (
    r"lc_txn_set|lc_txn_add|lc_txn_swap|lc_store|lc_store_release|lc_kill_fence|lci_step"
    r"|lc_txn_commit|atomic_thread_fence|atomic_(?:fetch|store|exchange|compare)\w+"
)
# A store lost, one that undoing does not know, a step of recovery left out, a commit too early, a
# guard dropped: each is noticed when somebody dies.
KILLED = [
    "lightcache/native/pages.c:lci_give_free:lc_txn_set#1:unlogged",
    "lightcache/native/reap.c:end_slot:lc_store_release#1:removed",
    "lightcache/native/reap.c:reap_some_records:lci_ticket_client_gone#1:skipped",
    "lightcache/native/reserve.c:settle_batch:keep#1:earlier",
    "lightcache/native/evict.c:lci_evict_settle:lci_pinned#1:skipped",
]
# No instruction of x86-64 is another.
EQUIVALENT = "lightcache/native/evict.c:finish:lc_store_release#1:relaxed"


@cache
def every() -> list[tuple[CSource, Mutant]]:
    """All mutants. Made by the first test that asks: each worker imports this file."""
    return list(mutants(ROOT))


def find(identity: str) -> tuple[CSource, Mutant]:
    return next(pair for pair in every() if pair[1].identity == identity)


def test_every_store_fence_and_commit_is_changed() -> None:
    for source in sources(ROOT):
        changed = {
            at
            for other, mutant in every()
            if other.path == source.path
            for start, end, _ in mutant.edits
            for at in range(start, end)
        }
        for found in re.finditer(rf"\b(?:{CHANGES})\(", source.bare):
            if source.function(found.start()):
                assert found.start() in changed, f"{source.path}:{source.line(found.start())}"


def test_identities_are_of_one_mutant_each() -> None:
    identities = [mutant.identity for _, mutant in every()]
    assert len(set(identities)) == len(identities) > 1000


def test_a_mutant_differs_in_what_it_says() -> None:
    for source, mutant in every():
        text = mutant.apply(source)
        assert text != source.text, mutant.identity
        start, end = min(e[0] for e in mutant.edits), max(e[1] for e in mutant.edits)
        assert text.startswith(source.text[:start]), mutant.identity
        assert text.endswith(source.text[end:]), mutant.identity


def test_brackets_match_in_every_mutant() -> None:
    for source, mutant in every():
        bare = CSource(source.path, mutant.apply(source)).bare
        assert all(bare.count(a) == bare.count(b) for a, b in ("()", "{}", "[]")), mutant.identity


def test_accepted_survivors_are_mutants_with_a_reason() -> None:
    listed = accepted()
    assert set(listed) <= {mutant.identity for _, mutant in every()}
    assert all(listed.values())


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """All that judges mutants, built with the core as it is; the C tests are run on their own."""
    need("gcc")
    programs = [stage.name for stage in OWN_STAGES]
    return Workshop.first(tmp_path_factory.mktemp("mutants") / "first", programs, 2)


@pytest.mark.crash
@pytest.mark.parametrize("stage", OWN_STAGES, ids=lambda stage: stage.name)
def test_the_core_as_it_is_passes(first: Workshop, stage: Stage) -> None:
    done = run([f"./{stage.name}"], first.folder, 5 * stage.seconds)  # beside other tests
    assert done.rc == 0, done.output


@pytest.mark.crash
def test_a_mutant_of_each_kind_is_killed(first: Workshop, tmp_path: Path) -> None:
    shop = first.copy(tmp_path / "shop")
    for name in KILLED:
        verdict = try_one(shop, first, *find(name))
        assert verdict.end in [stage.name for stage in OWN_STAGES], verdict
    assert try_one(shop, first, *find(EQUIVALENT)).end == "equivalent"


@pytest.mark.parametrize("marker", ["pin-fence", "evict-fence"])
def test_without_a_fence_of_pin_against_evict_a_model_fails(marker: str, tmp_path: Path) -> None:
    need("spin")
    source, mutant = next(
        (source, mutant)
        for source, mutant in every()
        if f"order: {marker} " in source.text.splitlines()[mutant.line - 1]
        and "atomic_thread_fence" in mutant.identity
        and mutant.kind == "removed"
    )
    for part in ("shm", "lightcache"):
        shutil.copytree(ROOT / part / "native", tmp_path / part / "native")
    (tmp_path / mutant.path).write_text(mutant.apply(source))
    assert models.verdict(tmp_path, tmp_path / "model") is True
