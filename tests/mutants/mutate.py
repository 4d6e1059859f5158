"""What is taken away or weakened in the core, one thing at a time.

Every store to shared memory, every fence, every commit, every step of recovery, and the conditions
that guard them. `mutants` lists them in the order of the text; an identity names file, function,
what was changed, its number there, and how, and stays the same while that function does.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mutants.csource import Call, CSource

Edit = tuple[int, int, str]

CORE = ("shm/native", "lightcache/native")
# Asked rather than changed: check is the judge, the layout is text, process.c is about mappings.
LEFT_OUT = {
    "check.c",
    "check.h",
    "check_records.c",
    "log_look_api.c",
    "facts.c",
    "facts.h",
    "layout_api.c",
    "process.h",
    "clients.h",
    "lock.h",
}
STORES_ONLY = {"process.c"}


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    identity: str
    kind: str
    path: str
    line: int
    edits: tuple[Edit, ...]

    def apply(self, source: CSource) -> str:
        text = source.text
        for start, end, new in sorted(self.edits, reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def diff(self, source: CSource) -> str:
        lines = [t.splitlines(keepends=True) for t in (source.text, self.apply(source))]
        return "".join(difflib.unified_diff(*lines, source.path, self.identity, n=2))


# ------------------------------------------------------------------ stores and fences

REMOVED = "((void)0)"


def logged(call: Call) -> Iterator[tuple[str, str]]:
    """A store through the undo log."""
    _, word, *values = call.args
    if call.name == "lc_txn_swap":
        old, new = values
        orders = "memory_order_acq_rel, memory_order_acquire"
        swap = f"atomic_compare_exchange_strong_explicit({word}, &was, {new}, {orders})"
        txn = call.args[0]
        note = f"lc_txn_note({txn}, lc_txn_word({txn}, {word}) | LC_LOG_PLAIN, was)"
        yield "removed", "true"
        yield "unlogged", f"({{ uint32_t was = ({old}); {swap}; }})"
        yield "plain", f"({{ uint32_t was = ({old}); {note}; lc_txn_arm({txn}); {swap}; }})"
        return
    value = values[0] if call.name == "lc_txn_set" else f"lc_load({word}) + ({values[0]})"
    yield "removed", REMOVED
    yield "unlogged", f"lc_store_release({word}, {value})"


def plain_store(call: Call) -> Iterator[tuple[str, str]]:
    yield "removed", REMOVED
    if call.name == "lc_store_release":
        yield "relaxed", f"lc_store({', '.join(call.args)})"


def atomic(call: Call) -> Iterator[tuple[str, str]]:
    """A read-modify-write, an ordered store or load, by its name in <stdatomic.h>."""
    name, args = call.name, list(call.args)
    exchange = name.startswith("atomic_compare_exchange")
    if name.startswith(("atomic_fetch", "atomic_exchange")):
        yield "removed", f"atomic_load_explicit({args[0]}, memory_order_relaxed)"
    elif exchange:
        yield "removed", "true"
    elif name.startswith("atomic_store"):
        yield "removed", REMOVED
    explicit = name.endswith("_explicit")
    orders = 2 if exchange else 1
    operands = args[:-orders] if explicit else args
    now = args[-orders:] if explicit else ["memory_order_seq_cst"] * orders
    name = name.removesuffix("_explicit") + "_explicit"

    def ordered(*order: str) -> str:
        return f"{name}({', '.join([*operands, *order])})"

    relaxed = ["memory_order_relaxed"] * orders
    if now != relaxed:
        yield "relaxed", ordered(*relaxed)
    if now[0] == "memory_order_seq_cst":
        weaker = "acq_rel" if name.startswith(("atomic_fetch", "atomic_comp")) else None
        weaker = weaker or ("acquire" if "load" in name else "release")
        rest = ["memory_order_acquire"] * (orders - 1)
        yield "no-total-order", ordered(f"memory_order_{weaker}", *rest)


def fence(call: Call) -> Iterator[tuple[str, str]]:
    yield "removed", REMOVED
    if call.name == "atomic_thread_fence" and call.args == ("memory_order_seq_cst",):
        yield "no-total-order", "atomic_thread_fence(memory_order_acq_rel)"


# Plain words of the segment, and what says which log and which client a step belongs to.
ASSIGNED = re.compile(
    r"(?<=[;{} \n])(?:(?:client|c)->(?:pid|flags|pidns|start_ticks|quarantine_until_ns)"
    r"|h?-?>?at->(?:slot|epoch|guest)|(?:t|txn)(?:->|\.)count"
    r"|r->(?:pages|buckets|reservations|tickets|chunks|index_bytes))(?: = [^;=]+;|\+\+;)"
)
COPIES = {"memset", "memcpy", "strncpy"}
COPIED_IN = {"fill", "set_namespace", "lci_format"}

# ------------------------------------------------------------------ steps and commits

COMMITS = {"lci_step", "lc_txn_commit", "keep"}
NO_STEP = re.compile(
    r"LC_PAUSE|lc_pause|__builtin|prefetch|free$|close|mem|str|snprintf|relax|pthread|munmap|point$|lc_txn_(?:set|add|swap)"
    r"|lc_store|lc_raise|atomic|lc_kill|syscall|clock_gettime|lc_event_sleep|register_handlers|start$|advance|load_heads|pass_heads"
)
# What a step that is part of an expression leaves behind when it is skipped.
SKIPPED = {
    **dict.fromkeys(["lci_collect", "lci_collect_doomed", "lci_clear_some", "unpin_ticket"], "0u"),
    **dict.fromkeys(["lci_end_reservation", "clear_row", "lc_txn_undo", "mark_list"], "0"),
    **dict.fromkeys(["recover", "reap_records", "lci_rebuild", "lcs_byte_lock"], "LC_OK"),
    **dict.fromkeys(["take_shard", "may_adopt", "refused", "lci_pin_one"], "LC_OK"),
    **dict.fromkeys(["lci_unpin_one", "lcs_byte_unlock", "pin_present"], "LC_OK"),
    **dict.fromkeys(["owner_dead", "lcs_thread_gone", "lci_doom_reservation", "lci_doom"], "false"),
    **dict.fromkeys(["lci_complete", "lci_ns_open", "lci_pinned", "may_be_written"], "false"),
    **dict.fromkeys(["sound", "is_mine", "named"], "true"),
    **dict.fromkeys(["lcs_slot_alive", "adopt_page", "lci_make_ready"], "1"),
    **dict.fromkeys(["lci_parent", "parent_of", "lc_list_remove"], "LC_NIL"),
    "copies": "COPIES_OVER",
    "free_slot": "LC_OK",
}


def step(source: CSource, call: Call) -> Iterator[tuple[str, tuple[Edit, ...]]]:
    whole = source.is_statement(call)
    if whole and not NO_STEP.match(call.name):
        yield "skipped", ((call.start, call.end, REMOVED),)
    elif not whole and call.name in SKIPPED:
        yield "skipped", ((call.start, call.end, f"({SKIPPED[call.name]})"),)
    if whole and call.name in COMMITS:
        before = source.statement_before(call.start)
        if before:
            moved = f"{source.text[call.start : call.end]}; {source.text[slice(*before)]}"
            yield "earlier", ((*before, moved), (call.start, call.end, REMOVED))


# ------------------------------------------------------------------ conditions

TRUTH = re.compile(
    r"lc_load|lci_(?:queueable|complete|pinned|parent|state_of|ns_of|ns_open|tick|doom)|has\(|whole\("
    r"|\b(?:writes_any|may_be_written|is_mine|owner_dead|standing|ready|confirm|named|named_word|swap"
    r"|take|lc_txn_swap|atomic_\w+|word|words?_of|gen|state|doomed|pending|mine|late|quarantine|undone"
    r"|orphan|moves|joined|made|parent|parent_is_new|tick|error|taken_over|LCI_NEW|LCI_PRESENT|held"
    r"|status|kept|unpinned|pinned|made|old|rid|count|freed|fresh|device|is_new|twin|why)\b"
)
BOUND = re.compile(
    r"_count\b|\bnodes\b|CHUNK_PAGES|CHAIN_MAX|LCS_SLOTS|LCI_SHARDS\b|LCI_BATCH|readonly|fork_word"
    r"|closed|wait\b|deadline|budget|LCS_LOG|!t?->?t?\.?error$|!t(?:->|\.)error|r->t\.error$|steps|hops"
    r"|LC_E_|rc\b|chunk_head|begin|end\b"
)


def guards(operand: str) -> bool:
    """Does it concern a truth field, rather than a bound or a caller's mistake?"""
    return bool(TRUTH.search(operand)) and not BOUND.search(operand)


def places(source: CSource) -> Iterator[tuple[str, int, int]]:
    """(what it is, start, end) of every expression that decides something."""
    for condition in source.conditions():
        yield condition.keyword, condition.start, condition.end
    for m in re.finditer(r"\b(return|bool \w+ =) ", source.bare):
        if source.function(m.start()):
            end = source.split(m.end(), len(source.bare), (";",))[0][1]
            if {"&&", "||"} & set(re.findall(r"&&|\|\|", source.bare[m.end() : end])):
                yield m.group(1).split()[0], m.end(), end


def decided(source: CSource) -> Iterator[tuple[str, int, str, tuple[Edit, ...]]]:
    for what, start, end in places(source):
        start, end = source.strip(start, end)
        hint = re.match(r"LC_(?:UN)?LIKELY(?=\()", source.text[start:end])
        if hint and source.match(start + hint.end()) == end:
            start, end = start + hint.end() + 1, end - 1
        either = source.split(start, end, ("||",))
        both = source.split(start, end, ("&&",))
        parts, neutral = (either, "false") if len(either) > 1 else (both, "true")
        if len(parts) == 1 and what in ("if", "while"):
            if guards(source.text[start:end]):
                yield what, start, "never", ((start, end, "false"),)
            if guards(source.text[start:end]) and what == "if":
                yield what, start, "always", ((start, end, "true"),)
        for a, b in (source.strip(*part) for part in parts if len(parts) > 1):
            if guards(source.text[a:b]):
                yield what, a, "dropped", ((a, b, neutral),)


# ------------------------------------------------------------------ all together


def of_calls(source: CSource) -> Iterator[tuple[str, int, str, tuple[Edit, ...]]]:
    for call in source.calls():
        rewrite = None
        if call.name.startswith("lc_txn_") and call.name[7:] in ("set", "add", "swap"):
            rewrite = logged
        elif call.name in ("lc_store", "lc_store_release", "lc_raise"):
            rewrite = plain_store
        elif call.name in ("atomic_thread_fence", "atomic_signal_fence", "lc_kill_fence"):
            rewrite = fence
        elif call.name.startswith("atomic_"):
            rewrite = atomic
        for kind, text in rewrite(call) if rewrite else ():
            yield call.name, call.start, kind, ((call.start, call.end, text),)
        if call.name in COPIES and source.function(call.start) in COPIED_IN:
            yield call.name, call.start, "removed", ((call.start, call.end, REMOVED),)
        if Path(source.path).name not in STORES_ONLY:
            for kind, edits in step(source, call):
                yield call.name, call.start, kind, edits


def of_file(source: CSource) -> Iterator[Mutant]:
    found = list(of_calls(source))
    for m in ASSIGNED.finditer(source.bare):
        if source.function(m.start()):
            name = re.split(r" =|\+\+", m.group())[0]
            found.append((name, m.start(), "removed", ((m.start(), m.end(), REMOVED + ";"),)))
    if Path(source.path).name not in STORES_ONLY:
        found += decided(source)
    numbers: Counter[tuple[str, str, str]] = Counter()
    for what, at, kind, edits in sorted(found, key=lambda one: one[1]):
        function = source.function(at)
        numbers[function, what, kind] += 1
        number = numbers[function, what, kind]
        identity = f"{source.path}:{function}:{what}#{number}:{kind}"
        yield Mutant(identity, kind, source.path, source.line(at), edits)


def sources(root: Path) -> list[CSource]:
    files = [path for part in CORE for path in sorted((root / part).glob("*.[ch]"))]
    kept = [path for path in files if path.name not in LEFT_OUT]
    return [CSource.read(root, str(path.relative_to(root))) for path in kept]


def mutants(root: Path) -> Iterator[tuple[CSource, Mutant]]:
    for source in sources(root):
        for mutant in of_file(source):
            yield source, mutant
