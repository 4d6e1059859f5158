"""An operation is stopped after every instruction: what would the others find if it died there?

`stepper.c` says what is asked at each step, `driver.c` what the victim does. Both are compiled
here, together with the core's own sources, optimised as they are when installed.

LIGHTCACHE_STEP_STRIDE: look after every so many changes of the segment (1).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from checker import raw

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
STRIDE = int(os.environ.get("LIGHTCACHE_STEP_STRIDE", "1"))
PAGES = 48
# What is taken away in the end, of the pages that were ready before; None: everything.
SCENES = {
    "reserve": 0,
    "reserve-evicting": 6,
    "publish": 0,
    "publish-shard": 0,
    "abandon": 0,
    "match": 0,
    "release": 0,
    "evict": 5,
    "ticket": 0,
    "clear": None,
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with `stepper` and `driver`."""
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("stepper")
    natives = [ROOT / "shm" / "native", ROOT / "lightcache" / "native"]
    sources = [str(path) for native in natives for path in sorted(native.glob("*.c"))]
    flags = ["-std=c11", "-O2", "-g", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pthread"]
    includes = [f"-I{native}" for native in natives]
    objects = folder / "core"
    objects.mkdir()
    subprocess.run(["cc", *flags, *includes, "-c", *sources], cwd=objects, check=True)
    core = [str(path) for path in sorted(objects.glob("*.o"))]
    for name in ("stepper", "driver"):
        command = ["cc", *flags, *includes, "-o", str(folder / name), str(HERE / f"{name}.c")]
        subprocess.run([*command, *core, "-lrt", "-Wl,-z,now"], check=True)
    return folder


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_death_after_every_instruction(
    scene: str, programs: Path, segment_name: str, tmp_path: Path
) -> None:
    segment = Path("/dev/shm") / f"lightcache.{segment_name}"
    arguments = [segment, PAGES, scene, STRIDE, tmp_path, 25, programs / "driver"]
    try:
        done = subprocess.run(
            [programs / "stepper", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
    finally:
        segment.unlink(missing_ok=True)
    if done.returncode == 2 and "ptrace" in done.stderr:
        pytest.skip(f"ptrace is not permitted here: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    print(scene, done.stdout, end="")
    words = done.stdout.split()
    counts = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    assert counts["looked"] > 4
    taken = SCENES[scene]
    assert counts["taken"] == (counts["stable"] if taken is None else taken)
    copies = sorted(tmp_path.glob("copy*"))
    assert len(copies) == counts["dumps"] > 0
    for copy in copies:
        whole = np.fromfile(copy, np.uint8)
        assert raw.check(whole, quiet=False, pages=PAGES) == [], copy.name
