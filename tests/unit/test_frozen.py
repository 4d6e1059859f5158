"""Nothing that others depend on changes by accident."""

import difflib

import pytest
from support.frozen import FOLDER, TEXTS


@pytest.mark.parametrize("name", TEXTS)
def test_frozen(name):
    then, now = (FOLDER / f"{name}.txt").read_text(), TEXTS[name]()
    changed = [
        line
        for line in difflib.unified_diff(then.splitlines(), now.splitlines(), lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    assert not changed, (
        "\n".join(changed)
        + f"\nif this is meant: python tests/support/frozen.py {name}, a line in "
        "CHANGELOG.md, and a new version where bytes change"
    )
