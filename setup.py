"""The two C libraries. All metadata is in setup.cfg.

Neither library includes Python.h: both are loaded through ctypes, so a wheel serves every Python 3
of its platform. They are declared as limited-API extensions so that their names do not name a
Python.
"""

import os
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

SHM_SOURCES = sorted(glob("shm/native/*.c"))
INDEX_SOURCES = sorted(glob("lightcache/native/*.c"))
HEADERS = sorted(glob("shm/native/*.h") + glob("lightcache/native/*.h"))


def is_process_wide(source: str) -> bool:
    """Whether a file holds globals or exports of the process, which must exist only once."""
    name = os.path.basename(source)
    return name == "process.c" or name.endswith("_api.c")


def library(name: str, sources: list[str]) -> Extension:
    if not sources:
        raise SystemExit(f"{name}: no C sources found; build from a complete checkout or sdist")
    flags = ["-std=c11", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"]
    if os.environ.get("LIGHTCACHE_WERROR") == "1":
        flags.append("-Werror")
    macros: list[tuple[str, str | None]] = [("_GNU_SOURCE", "1")]
    if os.environ.get("LIGHTCACHE_PAUSE") == "1":
        macros.append(("LC_PAUSE_POINTS", None))
    return Extension(
        name,
        sources=sources,
        depends=HEADERS,
        include_dirs=["shm/native", "lightcache/native"],
        define_macros=macros,
        extra_compile_args=flags,
        extra_link_args=["-pthread"],
        py_limited_api=True,
    )


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"bdist_wheel": PlatformWheel},
    ext_modules=[
        library("lightcache.shm._shm", SHM_SOURCES),
        library(
            "lightcache._index",
            INDEX_SOURCES + [source for source in SHM_SOURCES if not is_process_wide(source)],
        ),
    ],
)
