"""An engine that saves and loads without end, and is killed in the midst of it."""

from __future__ import annotations

import os
import sys

from gpu.vllm_case import PAGES_OF_PROMPT, PROMPTS, engine

from lightcache_bench._gpu_device import Gpu


def main(name: str, device: str) -> None:
    """Say the number of each turn when its prompts are saved, and go on until killed.

    Args:
        name: of the cache.
        device: "cuda:0" or "cpu".
    """
    made = engine(Gpu(device), name)
    turn = 0
    while True:
        for stamp in range(1, PROMPTS + 1):
            request, orders = made.compute(stamp, PAGES_OF_PROMPT, f"{turn}")
            made.stamp(request, stamp)
            made.begin(orders)
            made.end(request)
            reader, _, orders = made.find(stamp, PAGES_OF_PROMPT, f"{max(0, turn - 1)}")
            made.begin(orders)
            if orders.loads:
                made.until_loaded({reader.request_id})
            made.until_saved()
            made.end(reader)
        os.write(1, b"%d\n" % turn)
        turn += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
