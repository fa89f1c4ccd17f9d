"""Each file that rocprofv3 leaves is known by its content, and what lies beside a kernel trace is read with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.read.formats import Head, format_named, recognised
from tests.fixtures import dialects, exports


def known(path: Path) -> str | None:
    found = recognised(Head(path))
    return found[0].name if found else None


def test_each_kind_of_file(tmp_path: Path) -> None:
    kernels = dialects.rocprof_csv(tmp_path)
    assert known(kernels) == "rocprofv3"
    assert {known(path) for path in tmp_path.glob("*.csv") if path != kernels} == {"rocprofv3_parts"}
    (tmp_path / "odd name").write_text(json.dumps(dialects.rocprof_json()))
    assert known(tmp_path / "odd name") == "rocprofv3_json"
    database = exports.tables(tmp_path / "x.db", rocpd_kernel_dispatch_1=[{"pid": 1, "start": 1, "end": 2}])
    assert known(database) == "rocpd"


def test_what_lies_beside_says_so(tmp_path: Path) -> None:
    dialects.rocprof_csv(tmp_path)
    with pytest.raises(DlprofError, match="it is read with the kernel trace"):
        format_named("rocprofv3_parts").tables_of(tmp_path / "77_hip_api_trace.csv", "")


@pytest.mark.parametrize(
    "data", [b"SQLite format 3\0", b"SQLite format 3\0" + bytes(5000), b'{"rocprofiler": 1}', b"a,b\n"]
)
def test_other_files_are_none(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    assert known(tmp_path / "x") not in ("rocprofv3", "rocprofv3_parts", "rocprofv3_json", "rocpd")
