"""Files of other tools: chrome traces, Horovod, logs of GPUs and dumps become tables; others are told from them."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from dlprof import schema
from dlprof.analysis.communication.collectives import matched
from dlprof.analysis.panel import drawn
from dlprof.analysis.panels.machine import SAMPLES_PICTURE
from dlprof.errors import DlprofError
from dlprof.exports import perfetto
from dlprof.read import limits
from dlprof.read.foreign import horovod
from dlprof.read.formats import FORMATS, Format, Head, format_named, formats, recognised
from dlprof.read.gpu_logs import nvidia_smi
from dlprof.read.gpu_logs.readings import DAY, LOCAL, SECOND, ZONE, Readings, number, time_of
from dlprof.read.run import open_run
from tests.fixtures import dialects, jobs, runs, traces


def known(path: Path) -> str | None:
    found = recognised(Head(path))
    return found[0].name if found else None


def put(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# The list of formats.


def test_every_format_is_listed_once_and_is_read_or_says_why_not(tmp_path: Path) -> None:
    every = formats()
    assert len({one.name for one in every}) == len(every) >= len(FORMATS)
    for one in every:
        assert all((one.title, one.recognised, one.described["What it is"] == one.title))
        assert (one.read is None) == bool(one.left) != ("Real files seen" in one.described), one.name
        assert one.read is None or (one.brings and one.record and one.tables), one.name
        assert set(one.tables) | set(one.lacks) <= set(schema.TABLES), one.name
        assert format_named(one.name) is one
    with pytest.raises(DlprofError, match=r"torch\.profiler's trace"):
        format_named("execution_trace").tables_of(tmp_path / "et.json", "")


def test_opening_a_file_imports_nothing_heavy(tmp_path: Path) -> None:
    """No import of pandas comes before the traces are decoded beside it, in processes forked without it."""
    path = traces.write(tmp_path / "rank0.json", traces.training())
    loaded = "print([m for m in ('numpy', 'pandas', 'msgspec') if m in sys.modules])"
    code = f"import sys; from dlprof.read.run import open_run; {loaded}; open_run({str(path)!r})"
    code += "; import dlprof.read.kineto.prefetch; print('pandas' in sys.modules)"
    assert jobs.launch([sys.executable, "-c", code], tmp_path).stdout == "[]\nFalse\n"


KNOWN = {
    "torch_trace": json.dumps(traces.training()),
    "horovod": dialects.horovod(),
    "rocprofv3": dialects.KERNELS,
    "rocprofv3_parts": dialects.CALLS,
    "rocprofv3_json": json.dumps(dialects.rocprof_json()),
    "execution_trace": dialects.execution_trace(),
    "memory_timeline": "[[-1, 1, 37888, 7], [1687, 2, 512, 3]]",
    "autograd_profile": '[{"name": "mm", "ph": "X", "ts": 1, "dur": 2, "tid": 0, "pid": "CPU functions", "args": {}}]',
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_a_file_is_known_by_its_content(tmp_path: Path, name: str, packed: bool) -> None:
    data = KNOWN[name].encode()
    (tmp_path / "file.of.any.name").write_bytes(gzip.compress(data) if packed else data)
    assert known(tmp_path / "file.of.any.name") == name


HOSTILE = (
    *(
        b"",
        b"\0" * 5_000,
        b"[" * 100_000,
        b"{" * 100_000,
        b"\x1f\x8b" + b"\xff" * 100,
        b"\x0a" * 100_000,
        b"\xef\xbb\xbf[",
    ),
    *(b'[{"ph":"X"' + b"," * 300_000, b"a," * 200_000, b'{"schema": "1.0", "nodes"' + b"[" * 10_000),
    "٣²{".encode() * 1_000,
)


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_files_break_no_format(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    for one in formats():
        parts = one.recognise(Head(path))
        if parts and one.read:
            with pytest.raises(DlprofError):
                one.read(path, parts[0].piece)


def test_a_format_that_breaks_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Format(name="bad", title="bad", recognised="never", recognise=lambda _head: [][1])
    every = formats()
    monkeypatch.setattr("dlprof.read.formats.formats", lambda: (bad, *every))
    assert known(traces.write(tmp_path / "rank0.json", traces.training())) == "torch_trace"


def test_files_that_are_known_and_not_read_are_left(tmp_path: Path) -> None:
    run = open_run(runs.foreign(tmp_path / "job", traces.training(world_size=1)))
    perfetto.write(run, tmp_path / "all.json.gz")
    assert known(tmp_path / "all.json.gz") == "dlprof_export"
    path = put(tmp_path / "job" / "et.json", dialects.execution_trace())
    with pytest.raises(DlprofError, match="execution trace"):
        open_run(path)
    assert any("et.json" in w for w in open_run(tmp_path / "job").warnings)
    mixed = {"traceEvents": [], "schema": "1.0.1", "nodes": []}
    assert known(traces.write(tmp_path / "mixed.json", mixed)) == "torch_trace"


@pytest.mark.parametrize(
    ("data", "name"),
    [
        # A clock snapshot, as traced and as rocprofv3 begin; a timestamp.
        *((b"\n\x06\x32\x04\x0a\x02\x08\x00", "perfetto"), (b"\n\x80\x02\x40\x00" + bytes(300), "perfetto")),
        (b"\n\x05\xe2\x03\x02\x08\x00", "perfetto"),
        # What JAX and XLA write: a plane, with or without its number.
        *(
            (b"\n\xa1\xf0\x08\x12\x0e/host:metadata" + bytes(9), "xspace"),
            (b'\n\x90\x01\x08\x07\x12\x0d/device:GPU:0"', "xspace"),
        ),
        *((data, None) for data in (b"\n@ word\n", b"\n\x00\x00", b"\n\xff\xff\xff\xff\xff", bytes(50))),
    ],
)
def test_perfettos_packets_are_known(tmp_path: Path, data: bytes, name: str | None) -> None:
    (tmp_path / "x").write_bytes(data)
    assert known(tmp_path / "x") == name


# Horovod's timeline.


@pytest.mark.parametrize("closed", [True, False])
def test_each_rank_waits_from_when_it_was_ready(tmp_path: Path, closed: bool) -> None:
    path = put(tmp_path / "timeline.json", dialects.horovod(closed=closed))
    assert [(part.rank, part.piece) for part in horovod.recognise(Head(path))] == [(n, str(n)) for n in range(4)]
    for rank, ready_us in ((0, 0), (1, 10), (2, dialects.NEGOTIATED_US), (3, 30)):
        reading = horovod.read(path, str(rank))
        spans, steps = reading.tables["spans"], reading.tables["traced_steps"]
        assert (len(spans), reading.facts["world_size"]) == (8 * 3, 4)
        assert spans["start_ns"].iloc[0] == (dialects.EPOCH_US + 1_000 + ready_us) * 1_000
        took = (dialects.NEGOTIATED_US - ready_us + dialects.REDUCED_US) * 1_000
        for name, value in (("collective", "all_reduce"), ("dur_ns", took), ("bytes", 40_000), ("dtype", "float32")):
            assert set(spans[name]) == {value}
        # A step is from a tensor's first turn to its next.
        assert (len(steps), set(steps["dur_ns"])) == (7, {dialects.STEP_US * 1_000})


def test_the_others_wait_for_the_rank_that_is_late(tmp_path: Path) -> None:
    put(tmp_path / "timeline.json", dialects.horovod(late=2))
    assert [rank.index for rank in open_run(tmp_path).ranks] == [0, 1, 2, 3]
    waits = runs.measured(tmp_path, matched).frame(matched).groupby("rank")["wait_ns"].median()
    late = dialects.NEGOTIATED_US * 1_000
    assert waits[[0, 2, 3]].tolist() == [late, 0, late - 30_000]


def test_a_timeline_without_a_base_cut_odd_or_of_something_else(tmp_path: Path) -> None:
    text = dialects.horovod(closed=True)

    def read(text: str, rank: str = "0") -> Any:
        return horovod.read(put(tmp_path / "timeline.json", text), rank)

    bare = read(dialects.horovod(base=False))
    assert any("no base" in w for w in bare.warnings)
    assert bare.tables["spans"]["start_ns"].iloc[0] == 1_000_000
    counts = [len(read(text[: int(len(text) * share)]).tables["spans"]) for share in (0.2, 0.5, 0.9, 1)]
    assert 0 < counts[0] < counts[1] < counts[2] < counts[3]
    first, *lines = text.splitlines()
    odd = [
        '{"ph": "E", "ts": 5, "pid": 99},',
        '{"ph": "X", "name": "NEGOTIATE_ALLREDUCE", "ts": "soon", "pid": {}, "dur": -1},',
        '{"ph": "B", "name": "ALLREDUCE", "ts": 1e300, "pid": 1},',
        '{"ph": "M", "name": "process_name", "pid": 1, "args": [1]},',
        "7,",
    ]
    assert len(read("\n".join([first, *odd, *lines])).tables["spans"]) >= 8 * 2
    with pytest.raises(DlprofError, match="no collective of rank 9"):
        read(text, "9")
    other = put(tmp_path / "x", '[{"ph": "X", "name": "0", "ts": 1, "dur": 1, "pid": 1}]')
    assert not horovod.recognise(Head(other))


def test_no_more_of_a_timeline_is_read_than_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "timeline.json", dialects.horovod(steps=900))
    whole = horovod.read(path)
    monkeypatch.setattr(limits, "MOST_ROWS", 100)
    cut = horovod.read(put(tmp_path / "again.json", path.read_text()))
    assert 0 < len(cut.tables["spans"]) < len(whole.tables["spans"]) == 900 * 3
    assert (len(whole.warnings), len(cut.warnings)) == (0, 1)
    with pytest.raises(DlprofError):
        horovod.read(put(tmp_path / "other.json", '{"a": 1}'))


# Logs of GPUs, in the layouts that their tools' options give.

AT = int(datetime(2026, 3, 4, 5, 6, 7, tzinfo=timezone.utc).timestamp()) * SECOND


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("87 %", 87), ("612.34 W", 612.34), ("0x04", 4), ("(800Mhz)", 800)),
        *((text, None) for text in ("-", "[N/A]", "", "nan", "inf", "1e999", "0xzz", "0x")),
    ],
)
def test_numbers(text: str, value: float | None) -> None:
    assert number(text) == value


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2026/03/04 05:06:07.250", (AT + SECOND // 4, LOCAL)),
        ("20260304 05:06:07", (AT, LOCAL)),
        ("Wed Mar  4 05:06:07 2026", (AT, LOCAL)),
        ("2026-03-04T05:06:07+00:00", (AT, ZONE)),
        ("2026-03-04T07:06:07.000000000+02:00", (AT, ZONE)),
        ("2026-03-04T05:06:07Z", (AT, ZONE)),
        *((str(AT // unit), (AT, ZONE)) for unit in (SECOND, 1_000_000, 1)),
        ("05:06:07", ((5 * 3600 + 6 * 60 + 7) * SECOND, DAY)),
        *((text, None) for text in ("", "yesterday", "99/99/99", "12", "1" * 40)),
    ],
)
def test_times(text: str, time: tuple[int, str] | None) -> None:
    assert time_of(text) == time


def test_a_log_of_times_of_day_passes_midnight_and_one_without_times_is_none() -> None:
    log = Readings(Path("x"), "nvidia-smi", timed=True)
    for at in ("23:59:59", "00:00:00"):
        log.add("0", at, [("power_w", 1.0)])
    before, after = log.reading().tables["samples"]["at_ns"]
    assert after - before == SECOND
    log = Readings(Path("x"), "nvidia-smi", timed=True)
    log.add("0", "never", [("power_w", 1.0)])
    with pytest.raises(DlprofError):
        log.reading()


SMI_HEAD = "timestamp, pci.bus_id, utilization.gpu [%], utilization.memory [%]\n"
REASONS = ", ".join(f"clocks_throttle_reasons.{n}" for n in ("hw_thermal_slowdown", "sw_power_cap", "hw_slowdown"))
PLAIN = """# gpu   pwr gtemp mtemp    sm   mem   enc   dec  mclk  pclk    fb
# Idx     W     C     C     %     %     %     %   MHz   MHz    MB
    0   400    60     -    90    40     0     0  2619  1980  1024
    1    90    40     -     0     0     -     -  2619   345     0
# gpu   pwr gtemp mtemp    sm   mem   enc   dec  mclk  pclk    fb
# Idx     W     C     C     %     %     %     %   MHz   MHz    MB
    0   410    60     -   100    40     0     0  2619  1980  1024
    1    9"""
DATED = """#Date       Time        gpu   pwr gtemp mtemp    sm
#YYYYMMDD   HH:MM:SS    Idx     W     C     C     %
 20260304   05:06:07      0   400    60     -    90
"""
TIMED = DATED.replace("#Date       ", "#").replace("#YYYYMMDD   ", "#").replace(" 20260304   ", " ")
PROCESSES = """# gpu         pid   type     sm    mem    enc    dec    command
# Idx           #    C/G      %      %      %      %    name
    0       1234     C     40      5      -      -    python train.py
    0       1235     C     30      -      -      -    python
    1          -     -      -      -      -      -    -
    0       1234     C     20      5      -      -    python
    1          -     -      -      -      -      -    -
"""
WATCHED = """timestamp,gpu,gfx_activity,umc_activity,vcn_activity,socket_power,gfx_0_clk,gfx_0_max_clk,edge,hotspot
1772939616,0,95,80,"['N/A', 'N/A']",350,1980,2100,38,72
1772939617,0,85,80,"['N/A', 'N/A']",N/A,1980,2100,38,73
1772939616,1,20,5,"['N/A', 'N/A']",300,1950,2100,36,68
"""
ROCM_CSV = """device,Average Graphics Package Power (W),GPU use (%),VRAM Total Used Memory (B)
card0,19.0,0,27947008
card1,18.0,50,27947008
"""
BLOCKS = (
    "WARNING: a device is in a low-power state\n\n"
    "device,GPU use (%)\ncard0,40\n\ndevice,GPU memory use (%)\ncard0,60\n\ndevice,Fan speed (%)\ncard0,90\n"
)
ROCM = {
    "card0": {"GPU use (%)": "19", "Current Socket Graphics Package Power (W)": "7", "sclk clock speed:": "(800Mhz)"},
    "system": {"Driver version": "6.8"},
}
GPU = {
    "gpu": 0,
    "usage": {"gfx_activity": {"value": 40, "unit": "%"}, "umc_activity": "N/A"},
    "power": {"socket_power": {"value": 120, "unit": "W"}},
    "clock": {"gfx_0": {"clk": {"value": 1980, "unit": "MHz"}, "max_clk": {"value": 2100, "unit": "MHz"}}},
    "mem_usage": {"used_vram": {"value": 8, "unit": "GB"}, "total_vram": {"value": 16384, "unit": "MB"}},
}
OF_GPU = {"busy_share": [0.4], "sm_clock_mhz": [1980], "memory_used_bytes": [8 << 30], "memory_total_bytes": [1 << 34]}
DCGM = """#Entity   GPUTL                       FBUSD    TENSO
ID
GPU 0     87                          1024     0.312
GPU 1     N/A                         512      0.000
GPU-I 0/7 N/A                         N/A      0.400
"""
SAMPLE = '{"at_ns":1772939616000000000,"perf_ns":5,%s}\n'


@pytest.mark.parametrize(
    ("tool", "text", "values", "absent", "times"),
    [
        # The cut last line is not worth a warning.
        (
            "nvidia_dmon",
            PLAIN,
            {"0": {"busy_share": [0.9, 1.0], "memory_used_bytes": [1 << 30] * 2}, "1": {"sm_clock_mhz": [345]}},
            ("nvidia-smi 0", "memory_temperature_c"),
            "none",
        ),
        ("nvidia_dmon", DATED, {"0": {"power_w": [400]}}, (), "local"),
        ("nvidia_dmon", TIMED, {"0": {"power_w": [400]}}, (), "day"),
        ("nvidia_dmon", "#gpu, pwr, gtemp, sm\n#Idx, W, C, %\n0, 400, 60, 90\n", {"0": {"power_w": [400]}}, (), "none"),
        # DCGM's, whose header comes again, and a row of a MIG slice; a cut line.
        (
            "dcgm_dmon",
            DCGM * 2 + "GPU 0  1",
            {
                "0": {"busy_share": [0.87, 0.87], "memory_used_bytes": [1 << 30] * 2},
                "0/7": {"tensor_busy_share": [0.4] * 2},
            },
            ("dcgm 1", "busy_share"),
            "none",
        ),
        # The processes of a GPU are added up.
        ("nvidia_dmon", PROCESSES, {"0": {"busy_share": [0.7, 0.2]}, "1": {"busy_share": [0.0, 0.0]}}, (), "none"),
        # A header that a script repeats, and no units.
        (
            "nvidia_smi",
            "index, utilization.gpu [%], power.draw [W]\n0, 50, [Not Supported]\n1, 75, 300.5\n" * 2,
            {"0": {"busy_share": [0.5, 0.5]}, "1": {"busy_share": [0.75, 0.75], "power_w": [300.5, 300.5]}},
            ("nvidia-smi 0", "power_w"),
            "none",
        ),
        # Reasons one by one are the mask of all.
        (
            "nvidia_smi",
            f"timestamp, index, clocks.sm [MHz], {REASONS}\n"
            "2026/03/04 05:06:07.250, 0, 1300 MHz, Active, Active, Not Active\n",
            {"0": {"clock_reasons_bits": [0x44], "sm_clock_mhz": [1300]}},
            (),
            "local",
        ),
        # Without a header, units and a time say what the columns are.
        (
            "nvidia_smi",
            "2026/03/04 05:06:07.250, 00000000:3B:00.0, 87 %, 41 %, 412.20 W\n" * 3,
            {"00000000:3B:00.0": {"busy_share": [0.87] * 3, "power_w": [412.2] * 3}},
            (),
            "local",
        ),
        (
            "amd_smi",
            WATCHED,  # the hotspot's temperature comes before the edge's
            {
                "0": {"busy_share": [0.95, 0.85], "power_w": [350], "temperature_c": [72, 73]},
                "1": {"sm_clock_max_mhz": [2100]},
            },
            (),
            "zone",
        ),
        (
            "amd_smi",
            ROCM_CSV * 2,
            {"rocm-smi 1": {"busy_share": [0.5, 0.5]}, "rocm-smi 0": {"memory_used_bytes": [27947008] * 2}},
            (),
            "none",
        ),
        (
            "amd_smi",
            BLOCKS,
            {"rocm-smi 0": {"busy_share": [0.4], "memory_busy_share": [0.6]}},
            ("rocm-smi 0", "fan"),
            "none",
        ),
        (
            "amd_smi",
            "\n".join([json.dumps(ROCM)] * 2),
            {"rocm-smi 0": {"busy_share": [0.19, 0.19], "sm_clock_mhz": [800, 800]}},
            (),
            "none",
        ),
        # amd-smi's JSON of every release, and a cut document, which loses itself alone.
        *(("amd_smi", json.dumps(made), {"0": OF_GPU}, (), "none") for made in ([GPU], {"gpu_data": [GPU]}, GPU)),
        ("amd_smi", json.dumps([GPU]) + json.dumps([GPU])[:-30], {"0": {"power_w": [120]}}, (), "none"),
        # What is in a line of dlprof's own log says which sampler it is.
        ("sampled", SAMPLE % '"busy_share":0.5' * 3, {"gpu": {"busy_share": [0.5] * 3}}, (), ""),
        ("sampled", SAMPLE % '"core_percent":[9]' * 3, {"host": {"cores": [1] * 3}}, (), ""),
        ("sampled", SAMPLE % '"rss_bytes":7' * 3, {"processes": {"rss_bytes": [7] * 3}}, (), ""),
    ],
)
def test_a_log_of_gpus(
    tool: str, text: str, values: dict[str, dict[str, list[float]]], absent: Any, times: str, tmp_path: Path
) -> None:
    path = put(tmp_path / "log", text)
    assert format_named(tool).recognise(Head(path))
    reading = format_named(tool).tables_of(path, "")
    groups = reading.tables["samples"].groupby(["source", "metric"], observed=True)["value"]
    found = {(str(source), str(metric)): part.tolist() for (source, metric), part in groups}
    named = {
        "nvidia_dmon": "nvidia-smi ",
        "nvidia_smi": "nvidia-smi ",
        "amd_smi": "amd-smi ",
        "dcgm_dmon": "dcgm ",
    }.get(tool, "")
    for gpu, metrics in values.items():
        for metric, expected in metrics.items():
            assert found[gpu if "rocm" in gpu else f"{named}{gpu}", metric] == pytest.approx(expected)
    assert absent not in found
    if times:
        assert reading.facts["log log"]["times"] == times
    assert ["no header" in w for w in reading.warnings] == [True] * (tool == "nvidia_smi" and text.startswith("2026"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
@pytest.mark.parametrize(
    ("tool", "text"), [("nvidia_dmon", PLAIN), ("dcgm_dmon", DCGM), ("amd_smi", BLOCKS), ("amd_smi", json.dumps(ROCM))]
)
def test_a_log_that_powershell_wrote(tool: str, text: str, encoding: str, tmp_path: Path) -> None:
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / "wide").write_bytes((mark + text).encode(encoding))
    plain, wide = put(tmp_path / "log", text), tmp_path / "wide"
    assert (known(wide), known(plain)) == (tool, tool)
    assert (
        format_named(tool)
        .tables_of(wide, "")
        .tables["samples"]
        .equals(format_named(tool).tables_of(plain, "").tables["samples"])
    )


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        *(("dcgm_dmon", text) for text in ("", "#Entity\n", "Entity GPUTL\nGPU 0 3\n")),
        *(("nvidia_smi", text) for text in ("", "a,b\n1,2\n", "\x00\xff\n")),
        *(("nvidia_dmon", text) for text in ("", "# gpu\n0\n", "gpu pwr\n0 1\n", "\x00\x01")),
        *(("amd_smi", text) for text in ("", "{}", "[]", '{"gpu": 0}', "gpu,name\n0,x\n", "[" * 5000)),
        *(("sampled", text) for text in ("", "{}", '{"at_ns":5}\n', SAMPLE % '"loss":5')),
        *(("nvidia_smi", text) for text in ("timestamp\n", "2026/03/04 05:06:07.250, 0, 87, 41\n")),
    ],
)
def test_other_files_are_no_log_of_gpus(tool: str, text: str, tmp_path: Path) -> None:
    path = put(tmp_path / "log", text)
    assert not format_named(tool).recognise(Head(path))
    if tool != "sampled" and "timestamp" not in text and "2026" not in text:
        with pytest.raises(DlprofError):
            format_named(tool).tables_of(path, "")


def test_what_a_gpu_does_not_say_has_no_row_and_bad_lines_are_counted(tmp_path: Path) -> None:
    rows = ("250, 00000000:3B:00.0, 87 %, 41 %", "251, 00000000:86:00.0, [N/A], 3 %", "900, 00000000:86:00.0, 55 %, 4")
    log = SMI_HEAD + "".join(f"2026/03/04 05:06:07.{row}\n" for row in rows) + "2026/03/04 05:06:09.2"
    reading = nvidia_smi.read(put(tmp_path / "gpus.csv", log))
    frame = reading.tables["samples"]
    # As its clock shows it: whose zone that is, is judged with the run beside it.
    assert frame[frame["metric"] == "busy_share"][["source", "at_ns", "value"]].to_numpy().tolist() == [
        ["nvidia-smi 00000000:3B:00.0", AT + 250_000_000, 0.87],
        ["nvidia-smi 00000000:86:00.0", AT + 900_000_000, 0.55],
    ]
    assert (reading.facts["log gpus.csv"]["times"], reading.warnings) == ("local", ())
    head = "index, timestamp, memory.used [MiB], power.draw [W], clocks.current.sm [MHz], name, fan.speed [%]\n"
    row = "0, 2026/03/04 05:06:07.250, 1024, 612.5, 1755, NVIDIA H100, [N/A]\nnonsense\nmore, nonsense\n"
    reading = nvidia_smi.read(put(tmp_path / "gpus.csv", head + row))
    frame = reading.tables["samples"]
    found = dict(zip(frame["metric"], frame["value"], strict=True))
    assert found == {"memory_used_bytes": 1 << 30, "power_w": 612.5, "sm_clock_mhz": 1755}
    assert any("2 malformed lines" in w for w in reading.warnings)


@pytest.mark.parametrize(
    "made",
    [
        lambda path: runs.foreign(path, traces.training(), traces.training()),
        lambda path: runs.recorded(path, (traces.training(), [], runs.CPU)),
    ],
    ids=["beside traces", "in a run"],
)
def test_a_log_beside_traces_or_in_a_run_is_drawn_a_line_a_gpu(made: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = made(tmp_path / "job")
    put(folder / "loss.csv", "step,loss\n1,2\n")
    rows = (
        (f"2026/03/04 05:06:{s:02d}.000, 00000000:{gpu}:00.0, {busy} %, 0 %\n")
        for s in range(10, 40)
        for gpu, busy in (("3B", s), ("86", 9))
    )
    put(folder / "smi.csv", SMI_HEAD + "".join(rows))
    assert "nvidia_smi" in open_run(folder).ranks[0].files
    run = runs.measured(folder, SAMPLES_PICTURE.draw)
    (panel,) = (p for p in drawn(run, [SAMPLES_PICTURE]) if p.title == "GPU: some kernel ran")
    assert panel.columns == ("time_ns", "nvidia-smi 00000000:3B:00.0", "nvidia-smi 00000000:86:00.0")
    assert [row[2] for row in panel.rows] == pytest.approx([0.09] * len(panel.rows))
