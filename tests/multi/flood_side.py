"""A process that fills an index with prompts of its own, over and over, until it is told to end.

    flood_side.py NAME WHO

Prints a line when it begins, and one for every hundred prompts.
"""

from __future__ import annotations

import sys

from support.keys import prompt

from lightcache import PageIndex


def main() -> None:
    name, who = sys.argv[1], int(sys.argv[2])
    with PageIndex.attach(name, role=f"flood {who}") as index:
        print("begun", flush=True)
        for number in range(1_000_000):
            with index.reserve(prompt(1000 * who + number % 997, 1 + number % 9)) as new:
                if len(new.new):
                    new.publish()
            if number % 100 == 99:
                print(number + 1, flush=True)


if __name__ == "__main__":
    main()
