"""Every row of the list has its proofs: tests of this folder that carry its number, and tests
elsewhere that prove the same for the part that does it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
LENGTHS = {"A": 19, "B": 18, "C": 8, "D": 14, "E": 5}
ROWS = [f"{part}{number}" for part, last in LENGTHS.items() for number in range(1, last + 1)]

ELSEWHERE = {
    "A3": [
        "unit/test_hashing.py::test_one_token_is_left_to_compute",
        "unit/test_hashing.py::test_keys_of_a_prefix_are_a_prefix_of_the_keys",
        "unit/test_hashing.py::test_a_changed_token_changes_its_page_and_all_later_ones",
    ],
    "A4": [
        "unit/test_leases.py::test_a_match_pins_the_longest_ready_prefix",
        "unit/test_leases.py::test_pinned_pages_are_not_evicted",
        "unit/test_reservations.py::test_shards_are_published_one_by_one",
        "unit/test_reservations.py::test_a_killed_writer_gives_its_pages_back",
    ],
    "A5": [
        "unit/test_reservations.py::test_new_present_busy_and_missing",
        "unit/test_page_index.py::test_reserving_evicts_the_least_recently_used",
    ],
    "A6": [
        "unit/test_page_transfers.py::test_new_pages_are_published_when_the_copy_is_over",
        "unit/test_host_engine.py::test_one_direction_goes_in_order_and_the_other_does_not_wait",
        "multi/test_ranks.py::test_written_by_eight_read_by_fewer",
    ],
    "A8": [
        "multi/test_ranks.py::test_written_by_eight_read_by_fewer",
        "unit/test_page_transfers.py::test_what_is_present_busy_or_missing_is_left_alone",
    ],
    "A9": [
        "unit/test_storage_tier.py::test_calls_have_pages_of_one_request_and_reads_go_first",
        "unit/test_storage_tier.py::test_a_short_prompt_is_not_written",
    ],
    "A10": [
        "unit/test_storage_tier.py::test_only_what_the_cache_lacks_is_read",
        "unit/test_storage_failures.py::test_a_bad_page_ends_the_prefix",
        "unit/test_storage_failures.py::test_a_storage_that_dies_in_the_middle_of_a_batch",
    ],
    "A11": [
        "unit/test_storage_tier.py::test_a_task_waits_with_a_limit",
        "unit/test_storage_hangs.py::test_cancelling",
    ],
    "A14": [
        "unit/test_host_engine.py::test_every_byte_both_ways",
        "unit/test_transfer_engine_conformance.py::test_conformance",
    ],
    "B7": ["unit/test_rank_coordinator.py::test_one_rank_fails_to_write"],
    "C2": [
        "unit/test_hybrid_match.py::test_a_checkpoint_without_kv_is_not_usable",
        "unit/test_hybrid_match.py::test_a_limit",
    ],
    "C7": [
        "unit/test_hybrid_checkpoints.py::test_the_one_unused_for_longest_goes_first",
        "unit/test_hybrid_manager.py::test_a_checkpoint_stays_until_the_copy_has_been_executed",
    ],
    "D3": [
        "unit/test_hybrid_saving.py::test_a_stretch",
        "unit/test_hybrid_saving.py::test_over_any_stretches_what_is_needed_is_saved",
    ],
    "D4": [
        "unit/test_hybrid_slots.py::TestSlotMachine",
        "unit/test_hybrid_slots.py::test_plain_decoding_skips_no_save",
    ],
    "D5": ["unit/test_hybrid_checkpoints.py::test_donating_copies_nothing_on_the_device"],
    "D6": ["unit/test_hybrid_manager.py::test_a_checkpoint_stays_until_the_copy_has_been_executed"],
    "D8": [
        "unit/test_hybrid_checkpoints.py::test_at_most_so_many_on_a_path",
        "unit/test_hybrid_checkpoints.py::test_the_bound_spares_forks",
        "unit/test_hybrid_checkpoints.py::test_the_bound_spares_what_is_in_use",
    ],
    "D9": [
        "unit/test_hybrid_slots.py::test_room_follows_the_running_requests",
        "unit/test_hybrid_slots.py::test_trees_against_stamps",
        "parity/test_d_rejections.py::test_d11_speculation_with_rejections",
        "parity/test_d_rejections.py::test_d11_rejected_tokens_fall_back_to_a_saved_state",
    ],
    "D14": ["unit/test_hybrid_manager.py::test_tails_of_kv_go_by_policy"],
    "E1": ["unit/test_hybrid_tables.py::test_a_sequence"],
    "E2": ["unit/test_hybrid_tables.py::test_every_form_against_the_loop"],
    "E3": [
        "unit/test_hybrid_tables.py::test_every_form_against_the_loop",
        "unit/test_hybrid_tables.py::test_capacity_uses_the_budget",
    ],
    "E4": ["unit/test_hybrid_features.py::test_what_does_not"],
    "E5": ["unit/test_hybrid_tables.py::test_what_is_wrong_names_the_sequence"],
}


@cache
def names(path: Path) -> set[str]:
    """Tests of a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in found if name.lower().startswith("test")}


def numbered() -> dict[str, int]:
    """How many tests carry the number of each row."""
    found: dict[str, int] = defaultdict(int)
    for path in (*TESTS.glob("parity/test_*.py"), *TESTS.glob("multi/test_*.py")):
        for name in names(path):
            if row := re.match(r"test_([a-e]\d+)_", name):
                found[row[1].upper()] += 1
    return found


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_proved(row: str) -> None:
    assert numbered()[row] or ELSEWHERE.get(row)
    for proof in ELSEWHERE.get(row, ()):
        file, _, name = proof.partition("::")
        assert name in names(TESTS / file), proof


def test_no_other_rows() -> None:
    assert set(ELSEWHERE) | set(numbered()) == set(ROWS)
