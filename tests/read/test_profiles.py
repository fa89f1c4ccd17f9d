"""Python profiles of cProfile, line_profiler, py-spy, austin and speedscope: recorded, by hand, and hostile."""

from __future__ import annotations

import json
import marshal
import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.host.stacks import is_own
from dlprof.errors import DlprofError
from dlprof.read.formats import Head
from dlprof.read.profiles import folded, frames, line_profiler, pstats, speedscope
from dlprof.read.profiles.frames import Stacks, phase_in, placed_file
from tests.fixtures.logged import GOLDEN

LIB = "/v/site-packages/torch"


def put(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def weights(reading: Any) -> dict[str, int]:
    table = reading.tables["stacks"]
    return dict(zip(table["stack"], table["samples"], strict=True))


@pytest.mark.parametrize(
    ("reader", "data"),
    [
        *((folded, data) for data in (b"", b"\0\0\0", b"import os; import sys\nx = 5\n", b"{}", b"a,b\n1,2\n")),
        (folded, b"Some text with 12\nand more; of it\n"),
        *((line_profiler, data) for data in (b"", b"\x80\x04N.", b"Timer unit: 1 s", b"text")),
        *((pstats, data) for data in (b"", b"{}", b'{"a": 1}', b"\x80\x04}.")),
        *((speedscope, data) for data in (b"", b"{}", b'{"traceEvents": []}', b'{"profiles": []}', b"[]")),
    ],
)
def test_other_files_are_no_profile(reader: Any, data: bytes, tmp_path: Path) -> None:
    path = put(tmp_path / "x", data)
    assert not reader.FORMAT.recognise(Head(path))
    if reader is folded and not data.endswith((b"it\n", b"5\n")):
        with pytest.raises(DlprofError):
            reader.read(path)


# Whose a frame is, and what the step was doing.


@pytest.mark.parametrize(
    ("own", "files"),
    [
        (True, ("train.py", "/home/me/train.py", "models/torch_net.py", "C:\\me\\train.py")),
        (False, ("torch/nn/modules/module.py", "json/decoder.py", "threading.py", "<frozen importlib._bootstrap>", "")),
    ],
)
def test_a_shortened_file_of_a_library_is_no_file_of_the_users(own: bool, files: tuple[str, ...]) -> None:
    assert {file: is_own(placed_file(file)) for file in files} == dict.fromkeys(files, own)


def test_phases_are_those_of_the_recorder_and_roles_those_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    main, step = ("main", "train.py", 1), ("Adam.step", f"{LIB}/optim/adam.py", 1)
    forward = ("Module._call_impl", f"{LIB}/nn/modules/module.py", 1)
    # A closure's forward in the optimizer is a forward.
    assert [phase_in(stack) for stack in ([main], [main, step], [step, forward])] == ["", "optimizer", "forward"]
    stacks = Stacks(Path("p"), "tool", "samples")
    stacks.add("MainThread", [main], 3)
    stacks.add("pin_memory", [("run", "threading.py", 2)], 4)
    stacks.add("2", [main, ("_worker_loop", f"{LIB}/utils/data/_utils/worker.py", 5)], 5)
    stacks.add("MainThread", [], 9)
    table = stacks.reading().tables["stacks"]
    assert dict(zip(table["role"], table["samples"], strict=True)) == {"main": 3, "thread": 4, "worker": 5}
    assert set(table["profile"]) == {"p"}
    with pytest.raises(DlprofError):
        Stacks(Path("p"), "tool", "samples").reading()
    monkeypatch.setattr(frames, "MOST_NAMES", 2)
    stacks = Stacks(Path("p"), "tool", "samples")
    for n in range(5):
        stacks.add("", [(f"f{n}", "a.py", 1)], 1)
    assert len(stacks.reading().tables["stacks"]) == 2
    assert any("different stacks" in w for w in stacks.reading().warnings)


# Folded stacks, of py-spy 0.4 and austin 3.7.


def test_stacks_of_py_spy_with_threads() -> None:
    path = GOLDEN / "pyspy.raw.txt"
    assert folded.FORMAT.recognise(Head(path))
    reading = folded.read(path)
    table = reading.tables["stacks"]
    assert reading.facts["profile pyspy.raw.txt"] == {"tool": "py-spy", "unit": "samples"}
    # A thread that is in no Python has no frame.
    whole = sum(int(line.rpartition(" ")[2]) for line in path.read_text().splitlines() if ";" in line)
    assert table["samples"].sum() == whole
    fetch = table[(table["phase"] == "fetch") & table["stack"].str.contains("decode \\(train.py")]
    assert fetch["samples"].sum() > 100
    assert set(table["role"]) == {"main", "thread"}


def test_times_of_austin() -> None:
    path = GOLDEN / "calc.austin.txt"
    assert folded.FORMAT.recognise(Head(path))
    reading = folded.read(path)
    table = reading.tables["stacks"]
    assert reading.facts["profile calc.austin.txt"] == {"tool": "austin", "unit": "ns"}
    assert set(table["thread"]) == {"MainThread"}
    # By hand: the µs of the lines whose innermost frame is in decode.
    lines = [line.rpartition(";")[2] for line in path.read_text().splitlines()]
    expected = sum(int(x.rpartition(" ")[2]) * 1000 for x in lines if x.startswith("/home/user/job/calc.py:decode"))
    inside = table[table["stack"].str.fullmatch(r".*;decode \(/home/user/job/calc\.py:\d+\)")]
    assert inside["samples"].sum() == expected > 0


@pytest.mark.parametrize(
    ("text", "samples", "warnings"),
    [
        ("java;start_thread;[unknown] 3\njava;main thread;run 12\njava;main thread;run 1\n", [3, 13], 0),
        ("a (t.py:1);b (t.py:2) 7\n" * 3 + "a (t.py:1);b (t.", [21], 0),
        ("a (t.py:1);b (t.py:2) 7\n" * 3 + "nonsense\n\nnonsense\n", [21], 1),
    ],
    ids=["of flame graphs", "cut", "with nonsense"],
)
def test_folded_stacks(text: str, samples: list[int], warnings: int, tmp_path: Path) -> None:
    path = put(tmp_path / "x", text)
    assert bool(folded.FORMAT.recognise(Head(path))) == (not warnings)
    reading = folded.read(path)
    assert (sorted(weights(reading).values()), len(reading.warnings)) == (samples, warnings)


@pytest.mark.parametrize(
    "line", ["a" + " " * 100_000 + "b 1", "( " * 50_000 + ") 1", ":" * 100_000 + " 1", "P1;T1;" + ":" * 100_000 + " 1"]
)
def test_a_long_line_takes_no_longer_than_it_is_long(line: str, tmp_path: Path) -> None:
    path = put(tmp_path / "x", (line + "\n") * 3)
    folded.FORMAT.recognise(Head(path))
    with suppress(DlprofError):
        folded.read(path)


# line_profiler 5.1.


def lines(path: Path) -> dict[tuple[str, int], tuple[int, int]]:
    rows = line_profiler.read(path).tables["lines"][["function", "line", "hits", "dur_ns"]].itertuples(index=False)
    return {(function, line): (hits, ns) for function, line, hits, ns in rows}


def test_a_file_of_kernprof_and_its_text_say_the_same() -> None:
    assert all(line_profiler.FORMAT.recognise(Head(GOLDEN / name)) for name in ("calc.lprof", "calc-lines.txt"))
    exact, found = lines(GOLDEN / "calc.lprof"), lines(GOLDEN / "calc-lines.txt")
    assert (exact["decode", 8], exact["main", 22], len(exact)) == ((600_000, 105_109_853), (300, 218_002_226), 10)
    assert {key for key, (hits, _) in found.items() if hits} == exact.keys()
    for key, (hits, ns) in exact.items():
        assert found[key][0] == hits
        assert found[key][1] == pytest.approx(ns, abs=51)  # a tenth of a µs is written
    table = line_profiler.read(GOLDEN / "calc-lines.txt").tables["lines"]
    assert table.set_index(["function", "line"])["source"]["decode", 8] == "        total += k * k % 7"
    assert found["decode", 5] == (0, 0)


class Runs:
    """Pickled, it would call a function when it is read."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_that_a_pickle_names_is_called(protocol: int, tmp_path: Path) -> None:
    for evil in (Runs(os.mkdir, str(tmp_path / "made")), Runs(eval, "1"), Runs(getattr, "x", "upper")):
        data = pickle.dumps(("line_profiler.line_profiler LineStats", evil), protocol)
        with pytest.raises(DlprofError):
            line_profiler.read(put(tmp_path / "x", data))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\x80\x04.", b"\x80\x04N.", b"\x80\x04}.", b"\x80\x04r\xff\xff\xff\xff.", b"\x80\x02\x82\x01."),
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.",
        b"cline_profiler\nLineStats\n.",
        b"cline_profiler\nLineStats\n(}(S'timings'\n(lS'unit'\nI1\nuoR.",
    ],
)
def test_a_hostile_pickle_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(DlprofError):
        line_profiler.read(put(tmp_path / "x", data))


def test_a_damaged_byte_is_never_more_than_an_error(tmp_path: Path) -> None:
    data = (GOLDEN / "calc.lprof").read_bytes()
    for at in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[at] ^= 0x01 if at % 2 else 0xFF
        with suppress(DlprofError):
            line_profiler.read(put(tmp_path / "x", bytes(damaged)))


# cProfile: marshal's data of plain values.

NESTED: Any = {("a.py", 1, "f"): (1, 2, 0.5, 1.5, {("b.py", 2, "ü"): (1, 1, 0.25, 0.5)})}
VALUES: Any = [1, -1, 2**31, 2**62, -(2**40), 0.1, "x" * 300, "é漢", (), (1,) * 300, None, True, False]


@pytest.mark.parametrize("version", range(5))
def test_marshalled_data_is_read_as_python_wrote_it(version: int) -> None:
    for value in (NESTED, VALUES):
        assert pstats.loads(marshal.dumps(value, version)) == value


def test_marshalled_data_that_is_not_plain_damaged_or_claims_a_size_is_refused() -> None:
    other = [marshal.dumps(value) for value in (compile("1", "x", "eval"), {1, 2}, 1j, Ellipsis)]
    sizes = [b"(\xff\xff\xff\x7f", b"[" * 100, b"s\xff\xff\xff\x7fx", b"l\xff\xff\x00\x00", b"r\x05\x00\x00\x00"]
    data = marshal.dumps(NESTED)
    for bad in (*other, *sizes, *(data[:at] for at in range(len(data)))):
        with pytest.raises(pstats.DamagedError):
            pstats.loads(bad)
    for at in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= flip
            with suppress(pstats.DamagedError):
                pstats.loads(bytes(damaged))


def test_a_file_of_cprofile() -> None:
    path = GOLDEN / "calc.prof"
    assert pstats.FORMAT.recognise(Head(path))
    reading = pstats.read(path)
    functions, stacks = reading.tables["functions"], reading.tables["stacks"]
    decode = functions[(functions["function"] == "decode") & (functions["file"] == "calc.py")].iloc[0]
    own = marshal.loads(path.read_bytes())["calc.py", 5, "decode"][2] * 1e9
    assert (decode["calls"], decode["own_ns"]) == (300, round(own))
    # All of decode is called by main. exec runs both the script and what it imports: dividing its time is an estimate.
    inside = stacks[stacks["stack"].str.endswith("main (calc.py:20);decode (calc.py:5)")]
    assert inside["samples"].sum() == pytest.approx(own, rel=0.05)
    assert stacks["samples"].sum() == pytest.approx(functions["own_ns"].sum(), rel=0.05)


MAIN, F, G = ("t.py", 1, "main"), ("t.py", 5, "f"), ("t.py", 9, "g")


def profiled(folder: Path, stats: Any) -> Any:
    return pstats.read(put(folder / "p", marshal.dumps(stats)))


def test_a_functions_time_is_divided_among_its_callers_and_recursion_ends(tmp_path: Path) -> None:
    stats = {
        MAIN: (1, 1, 1.0, 10.0, {}),
        F: (2, 2, 2.0, 5.0, {MAIN: (2, 2, 2.0, 5.0)}),
        # 3 s below f and 4 s below main itself
        G: (7, 7, 7.0, 7.0, {F: (3, 3, 3.0, 3.0), MAIN: (4, 4, 4.0, 4.0)}),
    }
    main, f, g = "main (t.py:1)", "f (t.py:5)", "g (t.py:9)"
    found = {stack: ns / 1e9 for stack, ns in weights(profiled(tmp_path, stats)).items()}
    assert found == {main: 1.0, f"{main};{f}": 2.0, f"{main};{f};{g}": 3.0, f"{main};{g}": 4.0}
    stats = {
        MAIN: (1, 1, 0.0, 3.0, {}),
        F: (1, 9, 1.0, 3.0, {MAIN: (1, 1, 0.5, 3.0), F: (8, 8, 0.5, 2.0), G: (1, 1, 0.1, 0.2)}),
        G: (2, 2, 2.0, 2.5, {F: (2, 2, 2.0, 2.5)}),
    }
    assert 0 < sum(weights(profiled(tmp_path, stats)).values()) <= 3.5e9


@pytest.mark.parametrize(
    "stats",
    [
        *({}, {1: 2}, [], {MAIN: (1, 1, 1.0)}, {MAIN: (1, "x", 1.0, 1.0, {})}),
        *({MAIN: (1, 1, float("nan"), 1.0, {})}, {MAIN: (1, 1, 1e300, 1e300, {MAIN: 5})}),
    ],
)
def test_what_is_no_profile_of_cprofile_is_refused(stats: Any, tmp_path: Path) -> None:
    with pytest.raises(DlprofError):
        profiled(tmp_path, stats)
    with pytest.raises(DlprofError, match="not a whole profile"):
        pstats.read(put(tmp_path / "p", (GOLDEN / "calc.prof").read_bytes()[:999]))


# Speedscope's JSON.

SCHEMA = "https://www.speedscope.app/file-format-schema.json"
FRAMES = [{"name": "main", "file": "t.py", "line": 1}, {"name": "f"}, {"name": "g"}]
EVENTS = [("O", 0, 0), ("O", 10, 1), ("C", 40, 1), ("O", 40, 2), ("C", 100, 0)]
EVENTED = {
    "type": "evented",
    "unit": "milliseconds",
    "startValue": 0,
    "endValue": 100,
    "events": [{"type": kind, "at": at, "frame": frame} for kind, at, frame in EVENTS],
}
SAMPLED = {"type": "sampled", "unit": "none", "samples": [[0, 1], [0], [7], [0, 1]], "weights": [2, 1, 9, 3]}
ONE = {"type": "sampled", "samples": [[0]], "weights": [2]}
SM, SF, SG = "main (t.py:1)", "main (t.py:1);f (<unknown>:0)", "main (t.py:1);g (<unknown>:0)"


def scoped(folder: Path, *profiles: dict[str, Any]) -> Path:
    named = [{"name": "t"} | profile for profile in profiles]
    return put(folder / "x", json.dumps({"$schema": SCHEMA, "shared": {"frames": FRAMES}, "profiles": named}))


def test_a_speedscope_file_of_py_spy() -> None:
    path = GOLDEN / "pyspy.speedscope.json.gz"
    assert speedscope.FORMAT.recognise(Head(path))
    phases = speedscope.read(path).tables["stacks"].groupby("phase", observed=True)["samples"].sum()
    assert (phases["fetch"], phases["backward"]) == (2_420_000_000, 150_000_000)  # 242 and 15 samples of 10 ms


@pytest.mark.parametrize(
    ("profiles", "expected", "warnings"),
    [
        ([EVENTED], {SM: 10_000_000, SF: 30_000_000, SG: 60_000_000}, 0),
        ([SAMPLED], {SM: 1, SF: 5}, None),
        # What counts something else than time is left out.
        ([ONE | {"unit": "seconds"}, ONE | {"unit": "bytes"}], {SM: 2_000_000_000}, 1),
        ([ONE | {"weights": [1e300]}], None, 0),
        ([ONE | {"samples": [[-1]]}], None, 0),
        ([{"type": "evented", "events": [{"type": "C", "at": 1, "frame": 0}, {"at": "x"}]}], None, 0),
        ([{"type": "evented", "events": [{"type": "O", "at": 2, "frame": 99}]}], None, 0),
    ],
)
def test_profiles_of_speedscope(profiles: list[Any], expected: Any, warnings: int | None, tmp_path: Path) -> None:
    path = scoped(tmp_path, *profiles)
    assert speedscope.FORMAT.recognise(Head(path))
    if expected is None:
        with pytest.raises(DlprofError):
            speedscope.read(path)
        return
    reading = speedscope.read(path)
    assert weights(reading) == expected
    assert warnings in (None, len(reading.warnings))
    with pytest.raises(DlprofError, match="not a whole"):
        speedscope.read(put(path, path.read_text()[:-5]))
