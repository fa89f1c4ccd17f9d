"""rocprofv3's CSV and JSON give the same process: kernels and copies linked to their calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.read.formats import Head, recognised
from dlprof.read.rocprof.text import read_csv, read_json
from dlprof.read.run import open_run
from dlprof.read.sources import Reading
from tests.fixtures import dialects


def rows(reading: Reading) -> list[tuple[object, ...]]:
    columns = ["lane", "kind", "name", "start_ns", "dur_ns", "launch", "copy"]
    return [tuple(row) for row in reading.tables["spans"][columns].itertuples(index=False)]


def test_both_forms_of_a_process_are_one(tmp_path: Path) -> None:
    by_csv = read_csv(dialects.rocprof_csv(tmp_path / "csv"))
    path = tmp_path / "77_results.json"
    path.write_text(json.dumps(dialects.rocprof_json()))
    by_json = read_json(path)
    assert [row[1:] for row in rows(by_csv)] == [row[1:] for row in rows(by_json)]
    assert rows(by_json) == [
        ("host:11", "runtime", "hipLaunchKernel", 10_001, 2_000, 1, ""),
        ("host:11", "runtime", "hipLaunchKernel", 10_002, 2_000, 2, ""),
        ("host:11", "runtime", "hipMemcpyAsync", 10_003, 2_000, 3, ""),
        ("device:-1", "copy", "MEMORY_COPY_HOST_TO_DEVICE", 15_000, 3_000, 3, "HtoD"),
        ("device:1", "kernel", "Cijk_gemm<float, 4>", 20_000, 5_000, 1, ""),
        ("device:1", "communication", "ncclDevKernel_Generic", 30_000, 5_000, 2, ""),
    ]
    assert by_json.tables["spans"]["bytes"].max() == 4_096


def test_markers_of_roctx_are_steps(tmp_path: Path) -> None:
    path = dialects.rocprof_csv(tmp_path / "csv")
    ranges = [(f"step {n}", 10_000 * (n + 1), 10_000 * (n + 2) - 100) for n in range(3)]
    rows_of = "".join(
        f'"MARKER_CORE_RANGE_API","{name}","77","11","{50 + n}","{start}","{end}"\n'
        for n, (name, start, end) in enumerate(ranges)
    )
    path.with_name("77_marker_api_trace.csv").write_text(dialects.CALLS + rows_of)
    whole = dialects.rocprof_json()
    tool = whole["rocprofiler-sdk-tool"][0]
    tool["strings"]["marker_api"] = [{"key": 50 + n, "value": name} for n, (name, _, _) in enumerate(ranges)]
    tool["strings"]["marker_api"].append({"key": [], "value": "odd"})
    tool["buffer_records"]["marker_api"] = [
        {
            "kind": 4,
            "operation": 0,
            "thread_id": 11,
            "correlation_id": {"internal": 50 + n, "external": 0},
            "start_timestamp": start,
            "end_timestamp": end,
        }
        for n, (_, start, end) in enumerate([*ranges, ("", 70_000, 71_000)])
    ]
    (tmp_path / "77_results.json").write_text(json.dumps(whole))
    for reading in (read_csv(path), read_json(tmp_path / "77_results.json")):
        steps = reading.tables["traced_steps"]
        assert steps[["step", "start_ns"]].to_numpy().tolist() == [[0, 10_000], [1, 20_000], [2, 30_000]]
        assert reading.facts["steps_by"] == "roctx ranges 'step #' (named by the trace)"


def test_a_folder_of_two_processes_is_two_ranks_and_the_calls_are_no_third(tmp_path: Path) -> None:
    for process in (77, 78):
        dialects.rocprof_csv(tmp_path, process)
    run = open_run(tmp_path)
    assert [rank.files["rocprofv3"].name for rank in run.ranks] == ["77_kernel_trace.csv", "78_kernel_trace.csv"]
    left = [one for one in run.taken if one.left]
    assert {one.format.name for one in left if one.format} == {"rocprofv3_parts"}
    assert len(left) == 4


def test_links_to_other_folders_are_not_followed(tmp_path: Path) -> None:
    path = dialects.rocprof_csv(tmp_path / "mine")
    calls = tmp_path / "mine" / "77_hip_api_trace.csv"
    calls.rename(tmp_path / "elsewhere.csv")
    calls.symlink_to(tmp_path / "elsewhere.csv")
    assert "runtime" not in set(read_csv(path).tables["spans"]["kind"])


@pytest.mark.parametrize(
    "text", ['{"rocprofiler-sdk-tool": [', '{"rocprofiler-sdk-tool": 7}', '{"rocprofiler-sdk-tool": [{}]}']
)
def test_broken_json_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    known = recognised(Head(path))
    assert known is not None
    assert known[0].name == "rocprofv3_json"
    with pytest.raises(DlprofError):
        read_json(path)


def test_malformed_lines_are_counted(tmp_path: Path) -> None:
    path = dialects.rocprof_csv(tmp_path)
    head, *below = path.read_text().splitlines(keepends=True)
    odd = f"a\rb\n{'c' * 200_000}\n"
    path.write_bytes("".join([head, odd, *below, "nonsense\n", '"a","b"\n' * 3]).encode())
    reading = read_csv(path)
    assert len(reading.tables["spans"]) == 6
    assert any("6 malformed lines" in w for w in reading.warnings)
