"""What is kept of a rank is used as long as it holds, and never where it does not; shares of a run are even."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import random
import resource
import stat
import struct
import threading
import tracemalloc
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from dlprof.analysis import engine
from dlprof.analysis.diagnosis import wanted
from dlprof.analysis.engine import RANK, Measure, RankFacts, needs, per_rank
from dlprof.analysis.engine import store as stores
from dlprof.analysis.engine.ranks import Failure, RankAnswer
from dlprof.analysis.engine.run import measure_rank, serial, travelling
from dlprof.analysis.engine.store import Kept, Store, find, not_there, open_store, shares
from dlprof.analysis.rules import RULES
from dlprof.errors import DlprofError, DoesNotApply, NotMeasured
from dlprof.read.limits import MOST_ROWS, MOST_TEXT, NO_LIMITS
from dlprof.read.run import Rank, Run, open_run
from tests.fixtures import runs, traces
from tests.fixtures.measures import RANKS, broken, job_of_four, nowhere, rows, silent
from tests.fixtures.places import TRACES

EVERY: tuple[Measure[Any], ...] = (rows, broken, silent, nowhere)


@per_rank
def strange(rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return what no file holds."""
    return pd.DataFrame({"it": [object()]})


@pytest.fixture(autouse=True)
def users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's cache folder, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of the user"))
    return tmp_path / "of the user" / "dlprof"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a job of four ranks of which nothing is known."""
    (tmp_path / "job").mkdir()
    return job_of_four(tmp_path / "job")


def kept(run: Run, measures: Sequence[Measure[Any]] = EVERY, **how: Any) -> Store:
    """Measure a run and keep all of it."""
    store = open_store(run, **how)
    store.make()
    answered(run, store, measures)
    return store


def answered(run: Run, store: Store | None, measures: Sequence[Measure[Any]] = EVERY) -> tuple[int, list[str]]:
    """Measure a run in this process; return how many ranks have an answer, and what a user is told."""
    lines: list[str] = []
    return len(engine.answers_of(run, measures, store=store, backend=serial, tell=lines.append)), lines


REAL = ["ddp_a100_rank0_of_2", "memory", "nsys", "stacks"]


@pytest.mark.parametrize("name", ["recorded", "counted", *REAL])
def test_answers_come_back_as_they_were(name: str, run: Run, tmp_path: Path) -> None:
    if name in REAL and not (TRACES / name).is_dir():
        pytest.skip(f"needs {name} beside the repository")
    todo = (broken, silent, nowhere) if name == "counted" else travelling(wanted(RULES))
    if name == "recorded":
        run = open_run(runs.cpu_run(tmp_path, 5 * runs.MS, 9 * runs.MS, cores=4))
    elif name in REAL:
        run = open_run(TRACES / name)
    store = open_store(run, tmp_path / "cache")
    for rank in run.ranks[:2]:
        answer = measure_rank(rank, todo)
        assert store.keep(rank, answer, store.stamp(rank)) == ""
        found = store.read([rank], todo).answers[rank.index]
        assert list(found.answers) == list(answer.answers)
        for key, one in answer.answers.items():
            assert type(found.answers[key]) is type(one)
            if isinstance(one, pd.DataFrame):
                pd.testing.assert_frame_equal(found.answers[key], one)
            else:
                assert str(found.answers[key]) == str(one)
        assert replace(found, answers={}) == replace(answer, answers={})
        if name == "counted":
            assert [type(a) for a in found.answers.values()] == [Failure, NotMeasured, DoesNotApply]


def test_what_is_kept_is_not_read_again(run: Run) -> None:
    kept(run)
    assert open_run(run.path) == run  # what is kept is no file of the traces
    for rank in run.ranks:
        path = rank.files["torch_trace"]
        at = path.stat()
        path.write_bytes(b"x" * at.st_size)  # whoever reads it fails
        os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
    lines: list[str] = []
    measured = engine.measure(run, EVERY, store=open_store(run), tell=lines.append)
    assert measured.frame(rows)["spans"].min() > 0
    assert lines == []


def changed(**fields: Any) -> Callable[[Run], Run]:
    """Return what replaces fields of rank 2."""
    return lambda run: replace(run, ranks=tuple(replace(r, **fields) if r.index == 2 else r for r in run.ranks))


def on_disk(change: Callable[[Path], object]) -> Callable[[Run], Run]:
    """Return what changes the trace of rank 2."""
    return lambda run: (change(run.ranks[2].files["torch_trace"]), run)[1]


def touch(path: Path) -> None:
    at = path.stat()
    os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns + 1))


def with_one_more(run: Run) -> Run:
    (run.path / "stacks.txt").write_text("main;work 3\n")
    return changed(files={**run.ranks[2].files, "folded": run.path / "stacks.txt"})(run)


CHANGES: dict[str, Callable[[Run], Run]] = {
    "grown": on_disk(lambda path: path.write_bytes(path.read_bytes() + gzip.compress(b"\n"))),
    "touched": on_disk(touch),
    "gone": on_disk(Path.unlink),
    "facts": changed(facts={"host": "a"}),
    "resumed": changed(resumed_ns=(7,)),
    "piece": changed(pieces={"torch_trace": "1"}),
    "one file more": with_one_more,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_rank_whose_files_or_facts_have_changed_is_read_again(change: Callable[[Run], Run], run: Run) -> None:
    store = kept(run)
    found = store.read(change(run).ranks, EVERY)
    assert sorted(found.answers) == [0, 1, 3]
    assert found.warnings() == ["1 rank is read again: their files have changed since"]


def test_limits_other_measures_and_a_moved_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = kept(run, (rows,))
    assert len(store.read(run.ranks, (rows,)).answers) == RANKS
    assert (store.read(run.ranks, EVERY).answers, store.read(run.ranks, EVERY).again) == ({}, {})
    assert store.read(run.ranks, ()).answers[0].answers == {}
    run = replace(run, recorded=True)  # what is known of a recorded run moves with it
    kept(run, (rows,))
    run.path.rename(tmp_path / "elsewhere")
    moved = replace(open_run(tmp_path / "elsewhere"), recorded=True)
    assert len(open_store(moved).read(moved.ranks, (rows,)).answers) == RANKS
    monkeypatch.setenv(NO_LIMITS, "1")  # what was read within limits may lack something
    assert open_store(moved).read(moved.ranks, (rows,)).answers == {}


def test_a_file_beside_a_kernel_trace_counts_as_one_of_its_rank(tmp_path: Path) -> None:
    (tmp_path / "1_kernel_trace.csv").write_text("a")
    rank = Rank(0, {"rocprofv3": tmp_path / "1_kernel_trace.csv"})
    store = Store(tmp_path, tmp_path / "kept")
    stamps = [store.stamp(rank)]
    for name, text in (("1_hip_api", "b"), ("1_hip_api", "bc"), ("2_hip_api", "of another process")):
        (tmp_path / f"{name}_trace.csv").write_text(text)
        stamps.append(store.stamp(rank))
    assert len(set(stamps[:3])) == 3
    assert stamps[3] == stamps[2]


VERSION = "another version of dlprof kept what is known of them"
DAMAGED = "what was kept of them is damaged"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"code": "another"}, VERSION),
        ({"format": stores.FORMAT + 1}, VERSION),
        ({"format": []}, VERSION),
        (None, DAMAGED),
        ({"answers": 1}, DAMAGED),
        ({"answers": {measure.name: {"frame": []} for measure in EVERY}}, DAMAGED),
        ({"answers": {measure.name: None for measure in EVERY}}, DAMAGED),
    ],
)
def test_a_footer_of_somebody_else_is_read_again_and_replaced(change: Any, why: str, run: Run) -> None:
    store = kept(run)
    stored = stores._Stored(store.path(2))
    stores._write(store.path(2), stored.frames(), {} if change is None else stored.footer | change)
    many, lines = answered(run, store)
    assert (many, lines[0]) == (RANKS, f"1 rank is read again: {why}")
    assert (answered(run, store), Kept().warnings()) == ((RANKS, []), [])


def test_the_code_is_known_by_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stores.code() == stores.code.__wrapped__()
    monkeypatch.setattr(stores, "_PACKAGE", tmp_path)
    for part in ("schema.py", "analysis/step/breakdown.py", "read/run.py", "report/html.py"):
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        codes = [stores.code.__wrapped__()]
        for text in ("1\n", "2\n"):
            (tmp_path / part).write_text(text)
            codes.append(stores.code.__wrapped__())
        assert len(set(codes)) == (1 if part.startswith("report") else 3)


@pytest.mark.parametrize("there", ["damaged", "a folder", "a pipe", "a link out"])
def test_what_is_no_file_of_ours_is_read_again_and_replaced(there: str, run: Run, tmp_path: Path) -> None:
    store = kept(run, (rows,))
    path = store.path(2)
    whole = path.read_bytes()
    path.unlink()
    (tmp_path / "out").write_bytes(whole)
    if there == "damaged":
        path.write_bytes(whole[:-100])
    elif there == "a folder":
        path.mkdir()
    elif there == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "out")
    many, lines = answered(run, store, (rows,))
    assert many == RANKS
    assert (f"1 rank is read again: {DAMAGED}" in lines) is (there == "damaged")
    if there == "a folder":
        assert lines[-1].startswith("1 rank could not be kept in ")
    else:
        assert stat.S_ISREG(path.lstat().st_mode)
        assert len(store.read(run.ranks, (rows,)).answers) == RANKS
    assert (tmp_path / "out").read_bytes() == whole


@pytest.mark.parametrize("full", [False, True])
def test_what_no_file_or_disk_holds_is_not_kept_and_told(full: bool, run: Run) -> None:
    store = open_store(run)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        many, lines = answered(run, store, (rows,) if full else (rows, strange))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    why = "File too large" if full else "a value of type object"
    assert (many, lines) == (RANKS, [f"4 ranks could not be kept in {store.folder}: {why}"])
    assert [path for path in store.folder.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"XDG_CACHE_HOME": "/caches"}, "/caches/dlprof"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/u"}, "/home/u/.cache/dlprof"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/u"}, "/home/u/.cache/dlprof"),
    ],
)
def test_of_traces_it_is_in_the_users_cache_folder(
    variables: dict[str, str], folder: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert open_store(run).folder.parents[1] == Path(folder)
    assert open_store(replace(run, recorded=True)).folder == run.path / ".dlprof" / "ranks"


def test_without_a_home_nothing_is_kept(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME")
    lines: list[str] = []
    assert find(run, None, requested=False, tell=lines.append) is None
    assert lines == []
    assert find(run, None, requested=True, tell=lines.append) is None
    assert [line.endswith("--cache names a folder") for line in lines] == [True]
    assert find(run, tmp_path / "cache", requested=True, tell=pytest.fail) is not None


def test_where_stores_are(run: Run, tmp_path: Path, users_cache: Path) -> None:
    store = Store(tmp_path, tmp_path)
    assert store.path(300) == tmp_path / "00256-00511" / "00300.npz"
    assert len({store.path(rank).parent for rank in range(16_384)}) == 64
    # Runs of one name share a cache, and nothing is written beside their traces.
    cache = tmp_path / "cache"
    for name in "ab":
        (tmp_path / name / "job").mkdir(parents=True)
        kept(job_of_four(tmp_path / name / "job"), (rows,), cache=cache)
        assert list((tmp_path / name / "job").glob(".*")) == []
    assert len(list(cache.glob("job-*"))) == 2
    again = open_run(tmp_path / "b" / "job")
    assert len(open_store(again, cache).read(again.ranks, (rows,)).answers) == RANKS
    # Files of one folder have stores of their own.
    for n in range(2):
        kept(open_run(traces.write(tmp_path / f"{n}.json.gz", traces.training(3 + n))), (rows,))
    one = open_run(tmp_path / "0.json.gz")
    assert open_store(one).folder.parent.name.startswith("0.json.gz-")
    assert len(list(users_cache.iterdir())) == 2
    assert len(open_store(one).read(one.ranks, (rows,)).answers) == 1


def sized(folder: Path, *sizes: int) -> Run:
    """Return a run of ranks whose files have so many bytes."""
    ranks = []
    for index, size in enumerate(sizes):
        path = folder / f"{index}.json"
        with path.open("wb") as file:
            file.truncate(size)
        ranks.append(Rank(index, {"torch_trace": path}))
    return Run(folder, tuple(ranks))


@pytest.mark.parametrize(
    ("sizes", "how", "has"),
    [
        ([1], {}, False),
        ([1], {"requested": True}, True),
        ([1], {"cache": True}, True),
        ([1] * stores.LARGE_RANKS, {}, False),
        ([1] * (stores.LARGE_RANKS + 1), {}, True),
        ([stores.LARGE_BYTES // 2] * 2, {}, False),
        ([stores.LARGE_BYTES // 2, stores.LARGE_BYTES // 2 + 1], {}, True),
    ],
)
def test_a_run_has_a_store_where_it_is_large_or_asked_for(
    sizes: list[int], how: dict[str, bool], has: bool, tmp_path: Path, users_cache: Path
) -> None:
    (tmp_path / "job").mkdir()
    run = sized(tmp_path / "job", *sizes)
    before = list(run.path.iterdir())
    cache = tmp_path / "cache" if how.get("cache") else None
    for _ in range(2):  # made once, it is there
        assert (find(run, cache, requested=how.get("requested", False), tell=pytest.fail) is not None) is has
        how = {} if "requested" in how else how
    assert users_cache.exists() is (has and not cache)
    assert list(run.path.iterdir()) == before


def test_a_store_that_cannot_be_written_is_told(run: Run, tmp_path: Path) -> None:
    run = replace(run, recorded=True)
    (run.path / ".dlprof").write_text("a file")
    lines: list[str] = []
    assert find(run, None, requested=True, tell=lines.append) is None
    assert [line.endswith(f"{run.path}/.dlprof/ranks (--cache names another folder)") for line in lines] == [True]
    assert find(run, tmp_path / "cache", requested=True, tell=pytest.fail) is not None


def test_shards_that_begin_at_the_same_moment_share_a_folder(run: Run, tmp_path: Path) -> None:
    at_once = 8
    for fresh in range(8):
        together = threading.Barrier(at_once)
        stores_of_one = [open_store(run, tmp_path / str(fresh), f"{k}/{at_once}") for k in range(at_once)]

        def make(store: Store, together: threading.Barrier = together) -> None:
            together.wait()
            store.make()

        with ThreadPoolExecutor(at_once) as pool:
            assert list(pool.map(make, stores_of_one)) == [None] * at_once
        assert (stores_of_one[0].folder / "README").is_file()


@pytest.mark.parametrize("where", [".dlprof", ".dlprof/ranks", ".dlprof/ranks/00000-00255"])
def test_nothing_is_written_or_read_through_a_link(where: str, run: Run, tmp_path: Path) -> None:
    run = replace(run, recorded=True)
    (tmp_path / "out").mkdir()
    (run.path / where).parent.mkdir(parents=True, exist_ok=True)
    (run.path / where).symlink_to(tmp_path / "out")
    lines: list[str] = []
    store = find(run, None, requested=True, tell=lines.append)
    lines += answered(run, store)[1]
    assert list((tmp_path / "out").iterdir()) == []
    assert len(lines) == 1
    (run.path / where).unlink()
    kept(run)
    (run.path / where).rename(tmp_path / "moved")
    (run.path / where).symlink_to(tmp_path / "moved")
    assert open_store(run).read(run.ranks, EVERY).answers == {}


FRAMES = {
    "numbers": pd.DataFrame(
        {
            "wide": np.array([-(2**63), 0, 2**63 - 1], dtype=np.int64),
            "narrow": np.array([-128, 0, 127], dtype=np.int8),
            "unsigned": np.array([0, 1, 2**64 - 1], dtype=np.uint64),
            "yes": [True, False, True],
            "share": [0.1, math.nan, -math.inf],
            "single": np.array([0.1, math.nan, 3e38], dtype=np.float32),
        }
    ),
    "text": pd.DataFrame({"name": ["aten::mm", "", "Größe\x00\n"], "more": ["a", None, "c"]}),
    "objects": pd.DataFrame(
        {
            "on": pd.Series([(0, 1), [2, (3,)], None], dtype=object),
            "mixed": pd.Series([1, "1", math.nan], dtype=object),
            "deep": pd.Series([{"a": {1: (2, None)}}, np.int64(3), np.float32(0.5)], dtype=object),
            "halves": pd.Series(["\ud800", pd.NA, True], dtype=object),
            "only text": pd.Series(["a", "b", "c"], dtype=object),
            "values": pd.Series([{1: "a", (2,): [None]}, np.bool_(True), 10**40], dtype=object),
        }
    ),
    "categories": pd.DataFrame(
        {
            "kind": pd.Categorical(["b", "a", None], categories=["b", "a", "unused"]),
            "size": pd.Categorical([2, 1, 2], categories=[1, 2, 3], ordered=True),
        }
    ),
    "nullable": pd.DataFrame(
        {
            "count": pd.array([1, None, 2**62], dtype="Int64"),
            "known": pd.array([True, None, False], dtype="boolean"),
            "ratio": pd.array([0.5, None, 1.5], dtype="Float64"),
            "label": pd.array(["a", None, ""], dtype="string"),
        }
    ),
    "times": pd.DataFrame(
        {"at": pd.DatetimeIndex(["2026-01-02", None, "1970-01-01"]), "took": pd.to_timedelta([0, 1, None])}
    ),
    "index": pd.DataFrame({"a": [1, 2]}, index=pd.Index(["x", "y"], name="key")),
    "range": pd.DataFrame({"a": [1, 2]}, index=pd.RangeIndex(10, 6, -2)),
    "twice": pd.DataFrame([[1, 2.0]], columns=["a", "a"]),
    "no rows": pd.DataFrame({"n": np.array([], np.int32), "s": pd.Series([], dtype=object), "t": pd.array([], "str")}),
    "no columns": pd.DataFrame(index=pd.RangeIndex(3)),
    "nothing": pd.DataFrame(),
}


@pytest.mark.parametrize("frames", [FRAMES, {}], ids=["every kind", "none"])
def test_frames_come_back_as_they_were(frames: dict[str, pd.DataFrame], tmp_path: Path) -> None:
    stores._write(tmp_path / "file", frames, {"beside": ["it", "\ud800", math.inf]})
    stored = stores._Stored(tmp_path / "file")
    assert stored.footer == {"beside": ["it", "\ud800", math.inf]}
    found = stored.frames()
    assert list(found) == list(frames)
    for name, frame in frames.items():
        pd.testing.assert_frame_equal(found[name], frame, obj=name)
        for column in range(frame.shape[1]):
            before, after = frame.iloc[:, column], found[name].iloc[:, column]
            assert [type(v) for v in before] == [type(v) for v in after], (name, before.name)


REFUSED = {
    "object": pd.DataFrame({"a": [object()]}),
    "bytes": pd.DataFrame({"a": [b"bytes"]}),
    "complex": pd.DataFrame({"a": [1 + 2j]}),
    "number as a name": pd.DataFrame({0: [1]}),
    "two levels": pd.DataFrame({"a": [1]}, index=pd.MultiIndex.from_tuples([(1, 2)])),
    "time zone": pd.DataFrame({"a": pd.to_datetime([0]).tz_localize("UTC")}),
    "set": pd.DataFrame({"a": [{1}]}),
}


@pytest.mark.parametrize("frame", REFUSED.values(), ids=REFUSED)
def test_what_would_not_come_back_is_refused(frame: pd.DataFrame, tmp_path: Path) -> None:
    with pytest.raises(stores.NotPlain):
        stores._write(tmp_path / "file", {"odd": frame}, {})


def forged(
    path: Path,
    *,
    packing: int = zipfile.ZIP_DEFLATED,
    directory: Callable[[zipfile.ZipFile], None] = lambda _: None,
    **arrays: Any,
) -> Path:
    """Write a file as `_write` does, with other arrays in it: an array, or the bytes of a .npy."""
    stores._write(path, {"numbers": FRAMES["numbers"]}, {"a": 1})
    with np.load(path) as stored:
        parts = {**stored, **arrays}
    with zipfile.ZipFile(path, "w", packing) as archive:
        for name, values in parts.items():
            if values is not None:
                held = io.BytesIO()
                if isinstance(values, bytes):
                    held.write(values)
                else:
                    np.save(held, values)
                archive.writestr(f"{name}.npy", held.getvalue())
        directory(archive)
    return path


def header(**changed: Any) -> NDArray[np.uint8]:
    """Return the header of a file of one frame of one column, with some of it changed."""
    spec = {"index": [0, 3, 1], "columns": [["a", "whole", 3, "int64"]], "labels": "str"}
    told = {"footer": {}, "frames": {"one": spec | changed}, "texts": []} | changed
    return np.frombuffer(json.dumps(told).encode(), dtype=np.uint8)


ARRAYS: dict[str, Any] = {"header": header(), "whole": np.arange(3), "real": np.empty(0)}


def is_one_line(path: Path) -> None:
    """Check that a file is refused in one line, and that little is allocated for it."""
    tracemalloc.start()
    with pytest.raises(DlprofError, match="file: damaged: ") as e:
        stores._Stored(path).frames()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(e.value)
    assert most < MOST_TEXT + (16 << 20)  # what `read_file` takes for a file of any size


LIES: list[dict[str, Any]] = [
    {"frames": []},
    {"index": [0, 4, 1]},
    {"index": [0, MOST_ROWS + 1, 1], "columns": [], "no": "values"},
    {"labels": "U100000000"},
    {"columns": []},
    *(
        {"columns": [["a", *spec]]}
        for spec in (
            *(("whole", rows, "int64") for rows in (4, 2, -1, 1 << 62)),
            *(("whole", 3, dtype) for dtype in ("U100000000", "object")),
            *(("text", 3, dtype) for dtype in ("object", "period[D]")),
            ("category", 3, False, ["whole", 1 << 62, "int64"]),
            ("json", 1 << 62, [{"numpy": ["V8", 1 << 28]}] * 3),
            ("json", 3, [{"code": "1 + 1"}] * 3),
        )
    ),
]


@pytest.mark.parametrize("changed", LIES, ids=lambda changed: json.dumps(changed)[:70])
def test_a_header_that_lies_is_one_line(changed: Any, tmp_path: Path) -> None:
    whole = {"whole": np.empty(0, dtype=np.int64)} if "no" in changed else {}
    is_one_line(forged(tmp_path / "file", **ARRAYS | whole | {"header": header(**changed)}))


def npy(shape: str, values: bytes) -> bytes:
    """Return a .npy of whole numbers that says to have a shape."""
    told = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}}}"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(told)) + told.encode() + values


class Bomb:
    """What would be called, were a pickle of it loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("a pickle was loaded",)


def with_more(archive: zipfile.ZipFile) -> None:
    archive.writestr("more.npy", b"")
    archive.getinfo("more.npy").file_size = 3 << 30


def encrypted(archive: zipfile.ZipFile) -> None:
    archive.getinfo("whole.npy").flag_bits |= 1


def told_smaller(archive: zipfile.ZipFile) -> None:
    archive.getinfo("whole.npy").file_size = 1_000


DEEP = b'{"footer": {}, "texts": [], "frames": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


FORGED: dict[str, dict[str, Any]] = {
    "none": {"whole": None},
    "int32": {"whole": np.arange(3, dtype=np.int32)},
    "two dimensions": {"whole": np.arange(3).reshape(1, 3)},
    "objects": {"whole": np.array([Bomb()], dtype=object)},
    "huge": {"whole": npy("(1099511627776,)", bytes(24))},
    "short": {"whole": npy("(3,)", bytes(16))},
    "long": {"whole": npy("(3,)", bytes(25))},
    "deep header": {"header": np.frombuffer(DEEP, dtype=np.uint8)},
    "unpacks to too much": {"directory": with_more},
    # It is unpacked as far as the directory says.
    "to more than told": {"directory": told_smaller, "whole": np.zeros(16 << 20, dtype=np.int64)},
    # What bzip2 and LZMA unpack to at once has no bound.
    "stored": {"packing": zipfile.ZIP_STORED},
    "encrypted": {"directory": encrypted},
}


@pytest.mark.parametrize("parts", FORGED.values(), ids=FORGED)
def test_another_array_is_one_line(parts: dict[str, Any], tmp_path: Path) -> None:
    good = stores._Stored(forged(tmp_path / "file", **ARRAYS)).frames()
    assert good["one"]["a"].to_list() == [0, 1, 2]
    is_one_line(forged(tmp_path / "file", **ARRAYS | parts))


def test_no_damage_changes_what_is_read(tmp_path: Path) -> None:
    """A date in the zip file's directory may be another one; all that is used has a checksum."""
    path = tmp_path / "file"
    stores._write(path, {"numbers": FRAMES["numbers"]}, {"a": 1})
    whole = path.read_bytes()
    rng, refused = random.Random(0), 0
    for n in range(100):
        broken = bytearray(whole)
        if n % 2:
            at = rng.randrange(len(broken))
            broken[at] ^= 1 << rng.randrange(8)
        else:
            del broken[rng.randrange(len(broken)) :]
        path.write_bytes(broken)
        try:
            stored = stores._Stored(path)
            pd.testing.assert_frame_equal(stored.frames()["numbers"], FRAMES["numbers"])
            assert stored.footer == {"a": 1}
        except DlprofError:
            refused += 1
    assert refused > 80


@pytest.mark.parametrize(
    ("sizes", "shards"),
    [*(([(n * 7919) % 1000 for n in range(40)], shards) for shards in (1, 2, 7, 40, 64)), ([0] * 12, 4)],
)
def test_each_rank_is_in_one_share(sizes: list[int], shards: int, tmp_path: Path) -> None:
    run = sized(tmp_path, *sizes)
    found = shares(run, shards)
    assert len(found) == shards
    assert sorted(rank.index for share in found for rank in share) == list(range(len(sizes)))
    bytes_of = [sum(rank.unpacked_bytes for rank in share) for share in found]
    assert max(bytes_of) <= sum(bytes_of) / shards + max(sizes)  # fuller than even by no more than the largest rank
    assert max(map(len, found)) <= (3 if shards == 4 else len(sizes))  # empty files are shared too
    assert found == shares(replace(run, ranks=tuple(reversed(run.ranks))), shards)


ANSWER = RankAnswer({}, {}, {}, ())


BY_NO_SHARD = "were read by no shard"
FIRST_EIGHT = ", ".join(f"{n}/100" for n in range(8))


@pytest.mark.parametrize(
    ("ranks", "of", "gone", "told"),
    [
        (64, 16, {5}, f"4 of 64 ranks {BY_NO_SHARD} (shard 5/16 is missing)"),
        (
            1_024,
            16,
            {3, 5},
            f"131 of 1,024 ranks {BY_NO_SHARD} (shards 3/16, 5/16 are missing; shard 7/16 is incomplete)",
        ),
        (100, 100, set(range(20)), f"20 of 100 ranks {BY_NO_SHARD} (shards {FIRST_EIGHT} … are missing)"),
    ],
)
def test_which_shards_are_missing_is_told(ranks: int, of: int, gone: set[int], told: str, tmp_path: Path) -> None:
    run = sized(tmp_path, *[100] * ranks)
    known = {r.index: ANSWER for k, share in enumerate(shares(run, of)) for r in share if k not in gone}
    for rank in shares(run, of)[7][: 3 if "incomplete" in told else 0]:
        del known[rank.index]
    kept = Kept(known, {f"{k}/{of}" for k in range(of) if k not in gone})
    assert not_there(run, kept, only_kept=False) == [f"{told}: reading them now"]
    assert not_there(run, kept, only_kept=True) == [f"{told}: left out"]


@pytest.mark.parametrize(
    ("known", "shards", "told"),
    [
        ([0, 1, 2], {"0/2", "1/3"}, ["1 of 4 ranks was read by no shard: reading it now"]),
        ([1], set(), ["1 of 4 ranks is known from before"]),
        ([1, 2], set(), ["2 of 4 ranks are known from before"]),
        ([], set(), []),
        ([0, 1, 2, 3], set(), []),
    ],
)
def test_what_was_read_before_is_told(known: list[int], shards: set[str], told: list[str], tmp_path: Path) -> None:
    kept = Kept(dict.fromkeys(known, ANSWER), shards)
    assert not_there(sized(tmp_path, *[100] * 4), kept, only_kept=False) == told


def test_shards_are_known_by_what_they_kept(tmp_path: Path) -> None:
    run = job_of_four(tmp_path)
    for k in (0, 2):
        share = replace(run, ranks=tuple(shares(run, 3)[k]))
        kept(share, (rows,), shard=f"{k}/3")
    lines: list[str] = []
    measured = engine.measure(run, [rows], store=open_store(run), backend=serial, tell=lines.append)
    assert measured.ranks == tuple(range(RANKS))
    assert lines == ["1 of 4 ranks was read by no shard (shard 1/3 is missing): reading it now"]
    assert answered(run, open_store(run), (rows,)) == (RANKS, [])
