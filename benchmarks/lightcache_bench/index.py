"""The page index: lookups, reservations, other ways of doing it, many processes, a router, memory,
import.

Measured from a process that did not create the pool, with all checks of arguments; pages of a
prompt lie all over the pool. 64 client slots. Every ratio is of medians of repetitions that took
turns with their baseline.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

from lightcache import KeySpec, hash_pages
from lightcache.engine_keys import EngineKeys
from lightcache.page_index import geometry
from lightcache_bench import Row, _contention, _latency, _pool, _routing, meets
from lightcache_bench._timing import clocked_cpu, interleaved, median, spread

SIZES = (20_000, 1_000_000)

_IMPORT = """
import sys, time
begin = time.perf_counter()
import numpy
middle = time.perf_counter()
import lightcache
end = time.perf_counter()
heavy = [name for name in ("torch", "click", "rich") if name in sys.modules]
import json
print(json.dumps([(end - begin) * 1e3, (middle - begin) * 1e3, heavy]))
"""


def rows(quick: bool) -> Iterator[Row]:
    """See `Benchmark.rows`. Takes minutes; `quick`: half a minute, without the large pool."""
    for pages in SIZES[:1] if quick else SIZES:
        prompts = _pool.prompts_for(pages, quick)
        with _pool.pool(pages, prompts) as index:
            yield from _latency.lookups(index, prompts, quick)
            yield from _latency.groups(index, prompts, quick)
            yield from _latency.one_page(index, quick)
            yield from _latency.by_number(index, quick)
            yield from _latency.alternatives(index, prompts, quick)
            yield from _latency.queue(index, prompts, quick)
            yield from _contention.tail_rows(index, min(prompts, 50), quick)
            yield from _latency.reserving(index, quick)
            yield from _latency.beside_doomed(index, quick)
        with _pool.pool(pages, min(prompts, 5)) as index:
            yield from _contention.throughput(index, min(prompts, 5), quick)
    yield from _routing.routes(quick)
    yield from naming(quick)
    yield memory()
    yield importing(quick)


def naming(quick: bool) -> Iterator[Row]:
    """Keys of 2,048 pages: from 131,072 tokens, and from an engine's SHA-256 in hex and back."""
    spec = KeySpec(fingerprint="bench", page_tokens=64, secret=bytes(16))
    tokens = np.arange(64 * 2048)
    hashes = [hashlib.sha256(str(page).encode()).hexdigest() for page in range(2048)]
    engine = EngineKeys(spec)
    keys = engine.encode(hashes)
    cases = {
        "keys from tokens": clocked_cpu(lambda _: hash_pages(spec, tokens)),
        "keys from an engine's hashes": clocked_cpu(lambda _: engine.encode(hashes)),
        "an engine's hashes from keys": clocked_cpu(lambda _: engine.decode(keys)),
    }
    times = interleaved(cases, 20 if quick else 300)
    for (name, each), target in zip(times.items(), (None, "<= 2 us", "<= 2 us"), strict=True):
        value = median(each) / 2048
        met = None if target is None else meets(value, target)
        params = {"pages": 2048, **spread(each / 2048)}
        yield Row(name, params, value, "us/page", target=target, met=met)


def memory() -> Row:
    """Bytes of the index for each page of a pool of a million."""
    pages = 1_000_000
    each = geometry(pages).end / pages
    params = {"pages": pages, "clients": 64}
    return Row(
        "index memory", params, each, "B/page", target="<= 210 B/page", met=meets(each, "<= 210")
    )


def importing(quick: bool) -> Row:
    """`import lightcache` in a new interpreter; what must not come with it counts as a miss."""
    times, numpys, heavy = [], [], set()
    for _ in range(3 if quick else 15):
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True
        )
        took, numpy_took, found = json.loads(done.stdout)
        times.append(took)
        numpys.append(numpy_took)
        heavy |= set(found)
    value = float(np.median(times))
    params = {**spread(times), "of_this_numpy": round(float(np.median(numpys)), 1)}
    params |= {"unwanted_modules": ", ".join(sorted(heavy)) or "none"}
    met = meets(value, "<= 150") and not heavy
    return Row("import lightcache", params, value, "ms", target="<= 150 ms", met=met)
