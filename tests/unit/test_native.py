"""The C core and the Python declarations say the same, and the loader notices when not."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from pathlib import Path

import pytest
from support.refusals import refused

from lightcache.shm import Segment, _native, codes, creation, errors, layout

HEADER = Path(__file__).parents[2] / "shm" / "native" / "lc_base.h"


def test_codes_equal_the_enum_of_the_core() -> None:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    body = re.search(r"enum lc_error \{(.*?)\};", text, flags=re.DOTALL)
    assert body is not None
    found = {name: int(value) for name, value in re.findall(r"LC_(\w+) = (-?\d+)", body[1])}
    assert {name.removeprefix("E_"): value for name, value in found.items()} == {
        code.name: code.value for code in codes.Code
    }


@pytest.mark.parametrize("code", [code for code in codes.Code if code not in (0, codes.Code.SYS)])
def test_every_code_has_its_exception(code: codes.Code) -> None:
    raised = codes.error(code, "do something")
    assert isinstance(raised, errors.LightcacheError)
    assert str(raised).startswith("do something: ")


def test_system_errors_name_the_errno() -> None:
    for number, kind in (
        (errno.ENOSPC, errors.NoSpace),
        (errno.EACCES, errors.PermissionDenied),
        (errno.EBADF, errors.LightcacheError),
    ):
        code = codes.Code.SYS - number
        assert codes.system_errno(code) == number
        raised = codes.error(code, "open")
        assert type(raised) is kind
        assert f"errno {number}" in str(raised)


def test_unknown_codes_and_other_kinds() -> None:
    assert isinstance(codes.error(-50, "x"), errors.CacheCorrupted)
    other = codes.error(codes.Code.FULL, "x", {codes.Code.FULL: errors.OutOfPages})
    assert isinstance(other, errors.OutOfPages)
    assert codes.check(7, "x") == 7
    refused(errors.Detached, "", codes.check, codes.Code.FORKED, "x")


def test_layout_is_verified_field_by_field() -> None:
    text = _native.quick().lcs_layout().decode()
    layout.verify(text, layout.STRUCTURES, layout.CONSTANTS, library="core")
    moved = text.replace("lcs_client.pid=8+4", "lcs_client.pid=12+4")
    assert moved != text
    with pytest.raises(errors.LayoutMismatch, match=r"lcs_client\.pid: expected 8\+4, found 12\+4"):
        layout.verify(moved, layout.STRUCTURES, layout.CONSTANTS, library="core")
    fewer = text.replace("LCS_SLOTS=64\n", "")
    with pytest.raises(errors.LayoutMismatch, match="LCS_SLOTS: expected 64, found nothing"):
        layout.verify(fewer, layout.STRUCTURES, layout.CONSTANTS, library="core")
    with pytest.raises(errors.LayoutMismatch, match="lcs_lock: expected nothing, found 256"):
        layout.verify(text, {"lcs_header": layout.SegmentHeader}, {}, library="core")


def test_loader_says_what_is_missing(tmp_path: Path) -> None:
    refused(errors.LightcacheError, "missing", _native.find, tmp_path, "_shm")
    broken = tmp_path / "_shm.abi3.so"
    broken.write_bytes(b"not a library")
    assert _native.find(tmp_path, "_shm") == broken
    refused(errors.LightcacheError, "cannot be loaded", _native.load, broken)
    with pytest.raises(errors.LayoutMismatch, match="lcs_no_such_call"):
        _native.load().declare({"lcs_no_such_call": (ctypes.c_int, ())})


def test_abi3_is_preferred(tmp_path: Path) -> None:
    for suffix in (".abi3.so", ".cpython-311-x86_64-linux-gnu.so", ".so"):
        (tmp_path / f"_shm{suffix}").touch()
    assert _native.find(tmp_path, "_shm").name == "_shm.abi3.so"


def test_advice_and_populating(segment_name: str) -> None:
    with Segment.create(segment_name, 1 << 20) as segment:
        segment.view(segment.payload_offset, 1)[0] = 3
        # Advice may be refused (no huge pages, no memory policies); then it says why.
        for huge, node in ((1, -1), (0, -2), (1, -2), (1, 0), (0, 0), (0, 4095)):
            code = _native.quick().lcs_advise(segment.address, segment.nbytes, huge, node)
            assert code == 0 or codes.system_errno(code)
        with segment.busy():
            populate = _native.blocking().lcs_populate
            fd = os.open(f"/dev/shm/lightcache.{segment_name}", os.O_RDWR)
            assert populate(fd, segment.address, 5000, segment.nbytes - 5000) == 0
            os.close(fd)
        assert segment.view(segment.payload_offset, 1)[0] == 3


def test_a_segment_lies_in_huge_pages_where_there_are_some(segment_name: str) -> None:
    """The probe tells whether this kernel collapses shared memory, and has huge pages just now."""
    probe, two = f"{segment_name}-probe", 2 << 20
    with Segment.create(probe, 2 * two) as segment:
        if _native.blocking().lcs_collapse(segment.address, segment.nbytes) != 0:
            pytest.skip("shared memory cannot be collapsed into huge pages here")
    with Segment.create(segment_name, 4 * two) as made, Segment.attach(segment_name) as other:
        for segment in (made, other):
            assert segment.address % two == 0
            assert bytes(segment.view(segment.payload_offset, 4 * two)) == bytes(4 * two)
        mapped = Path("/proc/self/smaps").read_text().split(f"{made.address:x}-")[1]
        assert int(mapped.split("ShmemPmdMapped:")[1].split()[0]) > 0


@pytest.mark.parametrize(("code", "calls"), [(0, 3), (-1, 1)], ids=["granted", "refused"])
def test_collapsing_is_in_steps_up_to_a_refusal(
    segment_name: str, monkeypatch: pytest.MonkeyPatch, code: int, calls: int
) -> None:
    step, asked = 2 << 20, []
    monkeypatch.setattr(creation, "_AT_ONCE", step)
    blocking = _native.blocking()

    def collapse(base: int, length: int) -> int:
        asked.append((base, length))
        return code

    monkeypatch.setattr(blocking, "lcs_collapse", collapse)
    with Segment.create(segment_name, 2 * step) as segment:
        all_steps = [
            (segment.address + begin, min(step, segment.nbytes - begin))
            for begin in range(0, segment.nbytes, step)
        ]
    assert len(all_steps) == 3
    assert asked == all_steps[:calls]
    del asked[:]
    monkeypatch.setattr(creation, "_COLLAPSE_NS", 0)
    Segment.create(segment_name, 2 * step).close()
    assert len(asked) == 1, "no time is left"


def test_system_calls_that_fail_say_why() -> None:
    address = ctypes.c_void_p()
    code = _native.quick().lcs_map(-1, 4096, True, ctypes.byref(address))
    assert codes.system_errno(code) == errno.EBADF
    assert address.value is None
    for call in (
        _native.quick().lcs_byte_lock(-1, 0, 1),
        _native.quick().lcs_byte_held(-1, 0, 1),
        _native.blocking().lcs_fallocate(-1, 0, 1),
    ):
        assert codes.system_errno(call) == errno.EBADF
