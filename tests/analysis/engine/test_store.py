"""What is kept of a rank is used as long as it holds, and never where it does not; shares of a run are even."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import pickle
import random
import shutil
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
from dlprof.analysis.engine.store import Kept, Store, find, left_out, not_there, open_store, shares
from dlprof.analysis.rules import RULES
from dlprof.errors import DlprofError, DoesNotApply, NotMeasured
from dlprof.read.limits import MOST_TEXT, NO_LIMITS
from dlprof.read.run import Rank, Run, open_run
from tests.fixtures import runs, traces
from tests.fixtures.measures import RANKS, broken, job_of_four, nowhere, rows, silent
from tests.fixtures.places import ROOT, TRACES

EVERY: tuple[Measure[Any], ...] = (rows, broken, silent, nowhere)


@per_rank
def strange(rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return what no file holds."""
    return pd.DataFrame({"it": [object()]})


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


def same(a: RankAnswer, b: RankAnswer) -> bool:
    """Compare two answers; raise AssertionError where frames differ."""
    assert list(a.answers) == list(b.answers)
    for name, one in a.answers.items():
        other = b.answers[name]
        assert type(one) is type(other)
        if isinstance(one, pd.DataFrame):
            pd.testing.assert_frame_equal(one, other)
        else:
            assert str(one) == str(other)
    return replace(a, answers={}) == replace(b, answers={})


def test_answers_come_back_as_they_were(run: Run) -> None:
    store = kept(run)
    found = store.read(run.ranks, EVERY)
    assert (found.again, sorted(found.answers)) == ({}, list(range(RANKS)))
    answer = found.answers[0]
    assert isinstance(answer.answers["broken"], Failure)
    assert type(answer.answers["silent"]) is NotMeasured
    assert type(answer.answers["nowhere"]) is DoesNotApply
    measured = measure_rank(run.ranks[0], (broken, silent, nowhere))
    assert same(measured, replace(answer, answers={n: a for n, a in answer.answers.items() if n != "rows"}))


@pytest.mark.parametrize(
    "name",
    ["ddp_a100_rank0_of_2", "dlrm_v100_8ranks", "gpu_async", "memory", "nsys", "resnet_rtx2080ti", "stacks", "tiny"],
)
def test_answers_of_real_traces_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    if not (TRACES / name).is_dir():
        pytest.skip(f"needs {name} beside the repository")
    run, todo = open_run(TRACES / name), travelling(wanted(RULES))
    store = open_store(run, tmp_path)
    for rank in run.ranks[:2]:
        answer = measure_rank(rank, todo)
        assert store.keep(rank, answer, store.stamp(rank)) == ""
        assert same(store.read([rank], todo).answers[rank.index], answer)


def test_answers_of_a_recorded_run_come_back_as_they_were(tmp_path: Path) -> None:
    ms = 1_000_000
    run, todo = open_run(runs.cpu_run(tmp_path, 5 * ms, 9 * ms, cores=4)), travelling(wanted(RULES))
    store = open_store(run)
    for rank in run.ranks:
        answer = measure_rank(rank, todo)
        assert store.keep(rank, answer, store.stamp(rank)) == ""
        assert same(store.read([rank], todo).answers[rank.index], answer)


def test_what_is_kept_is_not_read_again(run: Run) -> None:
    kept(run)
    store = open_store(run)
    for rank in run.ranks:
        path = rank.files["torch_trace"]
        at = path.stat()
        path.write_bytes(b"x" * at.st_size)  # whoever reads it fails
        os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
    lines: list[str] = []
    measured = engine.measure(run, EVERY, store=store, tell=lines.append)
    assert measured.frame(rows)["spans"].min() > 0
    assert lines == []


def grown(run: Run) -> Run:
    path = run.ranks[2].files["torch_trace"]
    path.write_bytes(path.read_bytes() + gzip.compress(b"\n"))
    return run


def touched(run: Run) -> Run:
    path = run.ranks[2].files["torch_trace"]
    at = path.stat()
    os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns + 1))
    return run


def gone(run: Run) -> Run:
    run.ranks[2].files["torch_trace"].unlink()
    return run


def told_more(run: Run) -> Run:
    ranks = [replace(rank, facts={"host": "a"}) if rank.index == 2 else rank for rank in run.ranks]
    return replace(run, ranks=tuple(ranks))


def resumed(run: Run) -> Run:
    return replace(run, ranks=tuple(replace(r, resumed_ns=(7,)) if r.index == 2 else r for r in run.ranks))


def with_one_more(run: Run) -> Run:
    path = run.path / "stacks.txt"
    path.write_text("main;work 3\n")
    ranks = [replace(r, files={**r.files, "folded": path}) if r.index == 2 else r for r in run.ranks]
    return replace(run, ranks=tuple(ranks))


def another_piece(run: Run) -> Run:
    ranks = [replace(rank, pieces={"torch_trace": "1"}) if rank.index == 2 else rank for rank in run.ranks]
    return replace(run, ranks=tuple(ranks))


@pytest.mark.parametrize("change", [grown, touched, gone, told_more, resumed, with_one_more, another_piece])
def test_a_rank_whose_files_or_facts_have_changed_is_read_again(change: Callable[[Run], Run], run: Run) -> None:
    store = kept(run)
    found = store.read(change(run).ranks, EVERY)
    assert sorted(found.answers) == [0, 1, 3]
    assert found.warnings() == ["1 rank is read again: their files have changed since"]


def test_what_was_read_within_limits_is_read_again_without(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    store = kept(run)
    monkeypatch.setenv(NO_LIMITS, "1")
    assert store.read(run.ranks, EVERY).answers == {}


def test_a_file_beside_a_kernel_trace_counts_as_one_of_its_rank(tmp_path: Path) -> None:
    (tmp_path / "1_kernel_trace.csv").write_text("a")
    rank = Rank(0, {"rocprofv3": tmp_path / "1_kernel_trace.csv"})
    store = Store(tmp_path, tmp_path / "kept")
    stamps = {store.stamp(rank)}
    (tmp_path / "1_hip_api_trace.csv").write_text("b")
    stamps.add(store.stamp(rank))
    (tmp_path / "1_hip_api_trace.csv").write_text("bc")
    stamps.add(store.stamp(rank))
    assert len(stamps) == 3
    (tmp_path / "2_hip_api_trace.csv").write_text("of another process")
    assert store.stamp(rank) in stamps


def test_what_another_version_kept_is_read_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    store = kept(run)
    monkeypatch.setattr(stores, "code", lambda: "another")
    found = store.read(run.ranks, EVERY)
    assert found.answers == {}
    assert found.warnings() == ["4 ranks are read again: another version of dlprof kept what is known of them"]
    assert answered(run, store)[0] == RANKS
    assert len(store.read(run.ranks, EVERY).answers) == RANKS


def test_another_format_is_read_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    store = kept(run)
    monkeypatch.setattr(stores, "FORMAT", stores.FORMAT + 1)
    assert store.read(run.ranks, EVERY).answers == {}


def test_the_code_is_known_by_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stores.code() == stores.code.__wrapped__()
    package = tmp_path / "dlprof"
    shutil.copytree(ROOT / "dlprof", package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(stores, "_PACKAGE", package)
    assert stores.code.__wrapped__() == stores.code()
    for changes, path in ((False, "report/html.py"), (True, "schema.py"), (True, "analysis/step/breakdown.py")):
        before = stores.code.__wrapped__()
        with (package / path).open("a") as file:
            file.write("# another line\n")
        assert (stores.code.__wrapped__() != before) is changes


def test_a_measure_that_was_not_asked_for_before_is_no_answer(run: Run) -> None:
    store = kept(run, (rows,))
    assert len(store.read(run.ranks, (rows,)).answers) == RANKS
    found = store.read(run.ranks, EVERY)
    assert (found.answers, found.again) == ({}, {})
    assert list(open_store(run).read(run.ranks, ()).answers[0].answers) == []


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "another file", "a folder", "a pipe", "a link out"])
def test_what_is_damaged_is_read_again_and_replaced(damage: str, run: Run, tmp_path: Path) -> None:
    store = kept(run)
    path = store.path(2)
    whole = path.read_bytes()
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    elif damage == "a pipe":
        os.mkfifo(path)
    elif damage == "a link out":
        (tmp_path / "out").write_bytes(whole)
        path.symlink_to(tmp_path / "out")
    else:
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        broken = {"cut": whole[:-100], "flipped": bytes(flipped), "empty": b"", "another file": b"PK no, JSON: {}"}
        path.write_bytes(broken[damage])
    many, lines = answered(run, store)
    assert many == RANKS
    told = ["1 rank is read again: what was kept of them is damaged"] if path.name and damage in DAMAGED else []
    assert lines[: len(told)] == told
    if damage == "a folder":
        assert lines[-1].startswith("1 rank could not be kept in ")
    else:
        assert stat.S_ISREG(path.lstat().st_mode)
        assert len(store.read(run.ranks, EVERY).answers) == RANKS
    if damage == "a link out":
        assert (tmp_path / "out").read_bytes() == whole


DAMAGED = {"cut", "flipped", "empty", "another file"}


def test_a_footer_of_somebody_else_is_read_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hash is right, and what stands in it is anything."""
    original = stores._write
    odd: Any
    for odd in ([], {"answers": 1}, {"answers": {"rows": None}}, {"answers": {"rows": {"frame": []}}}, {"format": []}):

        def written(path: Path, _: Any, footer: Any, odd: Any = odd) -> None:
            original(path, {}, {**footer, **odd} if odd else {})

        shutil.rmtree(run.path / ".dlprof", ignore_errors=True)
        with monkeypatch.context() as patched:
            patched.setattr(stores, "_write", written)
            store = kept(run, (rows,))
        found = store.read(run.ranks, (rows,))
        assert found.answers == {}
        assert found.again.total() == RANKS


def test_what_no_file_holds_is_not_kept_and_told(run: Run) -> None:
    store = open_store(run)
    many, lines = answered(run, store, (rows, strange))
    assert many == RANKS
    assert lines == [f"4 ranks could not be kept in {store.folder}: a value of type object"]
    assert list(store.folder.rglob("*.npz")) == []


def test_a_disk_that_is_full_costs_what_would_be_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(run)

    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    many, lines = answered(run, store)
    assert many == RANKS
    assert lines == [f"4 ranks could not be kept in {store.folder}: No space left on device"]
    assert [path for path in store.folder.rglob("*") if path.is_file()] == []


def test_a_folder_has_few_files(tmp_path: Path) -> None:
    store = Store(tmp_path, tmp_path)
    paths = [store.path(rank) for rank in range(16_384)]
    assert len(set(paths)) == 16_384
    assert len({path.parent for path in paths}) == 64
    assert store.path(300) == tmp_path / "00256-00511" / "00300.npz"


def test_a_run_may_be_moved_with_what_is_kept_of_it(run: Run, tmp_path: Path) -> None:
    kept(run)
    run.path.rename(tmp_path / "elsewhere")
    moved = open_run(tmp_path / "elsewhere")
    assert len(open_store(moved).read(moved.ranks, EVERY).answers) == RANKS


def test_what_is_kept_is_no_file_of_the_traces(run: Run) -> None:
    kept(run)
    again = open_run(run.path)
    assert again == run


def test_runs_of_one_name_share_a_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name in "ab":
        (tmp_path / name / "job").mkdir(parents=True)
        kept(job_of_four(tmp_path / name / "job"), cache=cache)
        assert list((tmp_path / name / "job").glob(".*")) == []
    assert len(list(cache.glob("job-*"))) == 2
    run = open_run(tmp_path / "b" / "job")
    assert len(open_store(run, cache).read(run.ranks, EVERY).answers) == RANKS


def test_files_of_one_folder_have_stores_of_their_own(tmp_path: Path) -> None:
    for n in range(2):
        path = traces.write(tmp_path / f"{n}.json.gz", traces.training(3 + n))
        kept(open_run(path), (rows,))
    run = open_run(tmp_path / "0.json.gz")
    assert open_store(run).folder == tmp_path / ".dlprof" / "0.json.gz" / "ranks"
    assert len(open_store(run).read(run.ranks, (rows,)).answers) == 1


def test_a_small_run_has_a_store_where_one_is_there_or_asked_for(run: Run, tmp_path: Path) -> None:
    def found(**how: Any) -> bool:
        return find(run, how.get("cache"), asked=how.get("asked", False), tell=pytest.fail) is not None

    assert not found()
    assert found(asked=True)
    assert found()
    shutil.rmtree(run.path / ".dlprof")
    assert not found()
    assert found(cache=tmp_path / "cache")
    assert not (run.path / ".dlprof").exists()


def test_a_large_run_has_a_store(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    many = replace(run, ranks=tuple(Rank(n) for n in range(stores.LARGE_RANKS + 1)))
    assert find(many, None, asked=False, tell=pytest.fail) is not None
    shutil.rmtree(run.path / ".dlprof")
    monkeypatch.setattr(Rank, "unpacked_bytes", stores.LARGE_BYTES)
    assert find(run, None, asked=False, tell=pytest.fail) is not None


def test_a_store_that_cannot_be_written_is_told(run: Run, tmp_path: Path) -> None:
    (run.path / ".dlprof").write_text("a file")
    lines: list[str] = []
    assert find(run, None, asked=True, tell=lines.append) is None
    assert len(lines) == 1
    assert lines[0].startswith("what is known of each rank is not kept: ")
    assert lines[0].endswith("(--cache names another folder)")
    assert find(run, tmp_path / "cache", asked=True, tell=lines.append) is not None
    assert len(lines) == 1


def test_shards_that_begin_at_the_same_moment_share_a_folder(run: Run, tmp_path: Path) -> None:
    at_once = 8
    for fresh in range(40):
        together = threading.Barrier(at_once)
        stores_of_one = [open_store(run, tmp_path / str(fresh), f"{k}/{at_once}") for k in range(at_once)]

        def make(store: Store, together: threading.Barrier = together) -> None:
            together.wait()
            store.make()

        with ThreadPoolExecutor(at_once) as pool:
            assert list(pool.map(make, stores_of_one)) == [None] * at_once
        assert (stores_of_one[0].folder / "README").is_file()


@pytest.mark.parametrize("where", [".dlprof", ".dlprof/ranks", ".dlprof/ranks/00000-00255"])
def test_nothing_is_written_through_a_link(where: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (run.path / where).parent.mkdir(parents=True, exist_ok=True)
    (run.path / where).symlink_to(tmp_path / "out")
    lines: list[str] = []
    store = find(run, None, asked=True, tell=lines.append)
    lines += answered(run, store)[1]
    assert list((tmp_path / "out").iterdir()) == []
    assert len(lines) == 1


def test_nothing_is_read_through_a_link(run: Run, tmp_path: Path) -> None:
    kept(run)
    (run.path / ".dlprof" / "ranks").rename(tmp_path / "out")
    (run.path / ".dlprof" / "ranks").symlink_to(tmp_path / "out")
    assert open_store(run).read(run.ranks, EVERY).answers == {}


def test_nothing_kept_is_nothing_told() -> None:
    assert Kept().warnings() == []


LARGEST = 2**64 - 1

FRAMES = {
    "numbers": pd.DataFrame(
        {
            "wide": np.array([-(2**63), 0, 2**63 - 1], dtype=np.int64),
            "narrow": np.array([-128, 0, 127], dtype=np.int8),
            "unsigned": np.array([0, 1, LARGEST], dtype=np.uint64),
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
            "halves": pd.Series(["\ud800", "fine", True], dtype=object),
            "only text": pd.Series(["a", "b", "c"], dtype=object),
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
    "no rows": pd.DataFrame(
        {"n": np.array([], dtype=np.int32), "s": pd.Series([], dtype=object), "t": pd.array([], "str")}
    ),
    "no columns": pd.DataFrame(index=pd.RangeIndex(3)),
    "nothing": pd.DataFrame(),
}


def test_frames_come_back_as_they_were(tmp_path: Path) -> None:
    stores._write(tmp_path / "file", FRAMES, {"beside": ["it", "\ud800", math.inf]})
    stored = stores._Stored(tmp_path / "file")
    assert stored.footer == {"beside": ["it", "\ud800", math.inf]}
    found = stored.frames()
    assert list(found) == list(FRAMES)
    for name, frame in FRAMES.items():
        pd.testing.assert_frame_equal(found[name], frame, obj=name)
        for column in range(frame.shape[1]):
            before, after = frame.iloc[:, column], found[name].iloc[:, column]
            assert [type(v) for v in before] == [type(v) for v in after], (name, before.name)


def test_no_frame_at_all_is_kept(tmp_path: Path) -> None:
    stores._write(tmp_path / "file", {}, {})
    assert stores._Stored(tmp_path / "file").frames() == {}


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame({"a": [object()]}),
        pd.DataFrame({"a": [b"bytes"]}),
        pd.DataFrame({"a": [1 + 2j]}),
        pd.DataFrame({0: [1]}),
        pd.DataFrame({"a": [1]}, index=pd.MultiIndex.from_tuples([(1, 2)])),
        pd.DataFrame({"a": pd.to_datetime([0]).tz_localize("UTC")}),
        pd.DataFrame({"a": [{1}]}),
    ],
    ids=["object", "bytes", "complex", "number as a name", "two levels", "time zone", "set"],
)
def test_what_would_not_come_back_is_refused(frame: pd.DataFrame, tmp_path: Path) -> None:
    with pytest.raises(stores.NotPlain):
        stores._write(tmp_path / "file", {"odd": frame}, {})


@pytest.mark.parametrize("value", [{"dict": 1}, {1: "a", (2,): [None]}, [], (), np.bool_(True), "\ud800", 10**40])
def test_values_come_back_from_json(value: Any) -> None:
    found = stores._from_json(stores._to_json(value))
    assert found == value
    assert type(found) is type(value)


def test_what_is_missing_stays_missing() -> None:
    assert stores._from_json(stores._to_json(pd.NA)) is pd.NA


def test_json_of_no_known_type_is_refused() -> None:
    with pytest.raises(DlprofError, match="no known type: 'code'"):
        stores._from_json({"code": "1 + 1"})


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


WHOLE, REAL = np.arange(3), np.empty(0)


def opened(path: Path) -> dict[str, pd.DataFrame]:
    return stores._Stored(path).frames()


def is_one_line(path: Path) -> None:
    """Check that a file is refused in one line, and that little is allocated for it."""
    tracemalloc.start()
    with pytest.raises(DlprofError, match="file: damaged: ") as e:
        opened(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(e.value)
    assert most < MOST_TEXT + (16 << 20)  # what `read_file` takes for a file of any size


def column(*spec: Any) -> dict[str, Any]:
    return {"columns": [["a", *spec]]}


@pytest.mark.parametrize(
    "changed",
    [
        {"frames": []},
        {"frames": {"one": 1}},
        {"footer": 1},
        {"texts": 1},
        {"index": [0, 4, 1]},
        {"index": [0, 3]},
        {"index": [0, 1 << 60, 1], "columns": []},
        {"labels": "int64"},
        {"labels": "U100000000"},
        {"columns": []},
        column("whole", 4, "int64"),
        column("whole", 2, "int64"),
        column("whole", -1, "int64"),
        column("whole", "3", "int64"),
        column("whole", 1 << 62, "int64"),
        column("whole", 3, "int7"),
        column("whole", 3, "U100000000"),
        column("whole", 3, "object"),
        column("whole", 3, "float64"),
        column("real", 3, "float64"),
        column("code", 3, "object"),
        column("text", 3, "object"),
        column("text", 3, "period[D]"),
        column("masked", 3, "Int64"),
        column("category", 3, False, ["whole", 1 << 62, "int64"]),
        column("json", 1 << 62, [{"numpy": ["V8", 1 << 28]}] * 3),
        column("json", 3, [{"code": "1 + 1"}] * 3),
        column("json", 3, [1]),
        column("json"),
    ],
    ids=lambda changed: json.dumps(changed)[:70],
)
def test_a_header_that_lies_is_one_line(changed: Any, tmp_path: Path) -> None:
    assert opened(forged(tmp_path / "file", header=header(), whole=WHOLE, real=REAL))["one"]["a"].to_list() == [0, 1, 2]
    is_one_line(forged(tmp_path / "file", header=header(**changed), whole=WHOLE, real=REAL))


def test_a_header_within_a_header_is_one_line(tmp_path: Path) -> None:
    deep = b'{"footer": {}, "texts": [], "frames": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    is_one_line(forged(tmp_path / "file", header=np.frombuffer(deep, dtype=np.uint8)))


def npy(told: str, values: bytes = b"") -> bytes:
    """Return a .npy with any description of its array."""
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(told)) + told.encode() + values


class Bomb:
    """What would be called, were a pickle of it loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("a pickle was loaded",)


@pytest.mark.parametrize(
    "whole",
    [
        None,
        b"",
        b"no array",
        WHOLE.astype(np.int32),
        WHOLE.reshape(1, 3),
        np.array(3),
        np.array([Bomb()], dtype=object),
        npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776,)}", bytes(24)),
        npy("{'descr': '<i8', 'fortran_order': False, 'shape': (3,)}", bytes(16)),
        npy("{'descr': '<i8', 'fortran_order': False, 'shape': (3,)}", bytes(25)),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", pickle.dumps([Bomb()])),
        npy("(" * 5_000),
        npy("__import__('os').getcwd()"),
    ],
    ids=range(13),
)
def test_another_array_is_one_line(whole: Any, tmp_path: Path) -> None:
    is_one_line(forged(tmp_path / "file", header=header(), whole=whole, real=REAL))


def test_what_unpacks_to_too_much_is_one_line(tmp_path: Path) -> None:
    def more(archive: zipfile.ZipFile) -> None:
        with archive.open("more.npy", "w") as file:
            for _ in range(300):
                file.write(bytes(1 << 20))

    path = forged(tmp_path / "file", directory=more)
    assert path.stat().st_size < 1 << 20
    is_one_line(path)


def test_what_unpacks_to_more_than_it_says_is_one_line(tmp_path: Path) -> None:
    """It is unpacked as far as the directory says."""

    def less(archive: zipfile.ZipFile) -> None:
        archive.getinfo("whole.npy").file_size = 1_000

    is_one_line(forged(tmp_path / "file", directory=less, whole=np.zeros(16 << 20, dtype=np.int64)))


@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_array_that_is_packed_otherwise_is_one_line(packing: int, tmp_path: Path) -> None:
    """What bzip2 and LZMA unpack to at once has no bound."""
    is_one_line(forged(tmp_path / "file", packing=packing))


def test_an_array_that_nobody_can_unpack_is_one_line(tmp_path: Path) -> None:
    def encrypted(archive: zipfile.ZipFile) -> None:
        archive.getinfo("whole.npy").flag_bits |= 1

    is_one_line(forged(tmp_path / "file", directory=encrypted))


@pytest.mark.parametrize("content", [b"", b"PK", b"PK\3\4", b"{}", b"\0" * 1000], ids=range(5))
def test_a_file_of_something_else_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    is_one_line(tmp_path / "file")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DlprofError, match="no such file"):
        opened(tmp_path / "file")


def test_no_damage_changes_what_is_read(tmp_path: Path) -> None:
    """A date in the zip file's directory may be another one; all that is used has a checksum."""
    path = tmp_path / "file"
    stores._write(path, {"numbers": FRAMES["numbers"]}, {"a": 1})
    whole = path.read_bytes()
    rng, refused = random.Random(0), 0
    for n in range(300):
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
            is_one_line(path)
            refused += 1
    assert refused > 250


ANSWER = RankAnswer({}, {}, {}, ())


def sized(folder: Path, *sizes: int) -> Run:
    """Return a run of ranks whose files have so many bytes."""
    ranks = []
    for index, size in enumerate(sizes):
        path = folder / f"{index}.json"
        with path.open("wb") as file:
            file.truncate(size)
        ranks.append(Rank(index, {"torch_trace": path}))
    return Run(folder, tuple(ranks))


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 40, 64])
def test_each_rank_is_in_one_share(shards: int, tmp_path: Path) -> None:
    run = sized(tmp_path, *((n * 7919) % 1000 for n in range(40)))
    found = shares(run, shards)
    assert len(found) == shards
    assert sorted(rank.index for share in found for rank in share) == list(range(40))
    bytes_of = [sum(rank.unpacked_bytes for rank in share) for share in found]
    assert max(bytes_of) <= sum(bytes_of) / shards + 1000  # no fuller than even by more than the largest rank


def test_shares_do_not_depend_on_the_order_of_ranks(tmp_path: Path) -> None:
    run = sized(tmp_path, *[100] * 20, *[50] * 20)
    other = replace(run, ranks=tuple(reversed(run.ranks)))
    assert [[r.index for r in share] for share in shares(run, 6)] == [
        [r.index for r in share] for share in shares(other, 6)
    ]


def test_empty_files_are_shared_too(tmp_path: Path) -> None:
    assert [len(share) for share in shares(sized(tmp_path, *[0] * 12), 4)] == [3, 3, 3, 3]


def without(run: Run, *shards: int, of: int) -> Kept:
    """Return what is kept where some shards were read by no shard."""
    found = shares(run, of)
    known = {rank.index: ANSWER for k, share in enumerate(found) for rank in share if k not in shards}
    return Kept(known, {f"{k}/{of}" for k in range(of) if k not in shards})


def test_a_missing_shard_is_told(tmp_path: Path) -> None:
    run = sized(tmp_path, *[100] * 1024)
    kept = without(run, 5, of=16)
    assert not_there(run, kept, only_kept=False) == [
        "64 of 1,024 ranks were read by no shard (shard 5/16 is missing): reading them now"
    ]
    assert not_there(run, kept, only_kept=True) == [
        "64 of 1,024 ranks were read by no shard (shard 5/16 is missing): left out"
    ]
    kept = without(run, 3, 5, of=16)
    for rank in shares(run, 16)[7][:3]:
        del kept.answers[rank.index]
    assert not_there(run, kept, only_kept=False) == [
        "131 of 1,024 ranks were read by no shard "
        "(shards 3/16, 5/16 are missing; shard 7/16 is incomplete): reading them now"
    ]


def test_of_many_missing_shards_the_first_are_named(tmp_path: Path) -> None:
    run = sized(tmp_path, *[100] * 100)
    (line,) = not_there(run, without(run, *range(20), of=100), only_kept=False)
    assert "shards 0/100, 1/100, 2/100, 3/100, 4/100, 5/100, 6/100, 7/100 … are missing" in line


def test_of_shards_of_several_divisions_only_the_ranks_are_told(tmp_path: Path) -> None:
    run = sized(tmp_path, *[100] * 4)
    kept = Kept(dict.fromkeys(range(3), ANSWER), {"0/2", "1/3"})
    assert not_there(run, kept, only_kept=False) == ["1 of 4 ranks was read by no shard: reading it now"]


def test_what_was_read_before_is_told(tmp_path: Path) -> None:
    run = sized(tmp_path, *[100] * 4)
    assert not_there(run, Kept({1: ANSWER}), only_kept=False) == ["1 of 4 ranks is known from before"]
    assert not_there(run, Kept({1: ANSWER, 2: ANSWER}), only_kept=False) == ["2 of 4 ranks are known from before"]
    assert not_there(run, Kept(), only_kept=False) == []
    assert not_there(run, Kept(dict.fromkeys(range(4), ANSWER)), only_kept=False) == []


def test_what_is_left_out_is_a_warning_of_the_run(tmp_path: Path) -> None:
    run = sized(tmp_path, *[100] * 4)
    assert left_out(run, [0, 3]).warnings == ("2 of 4 ranks were read by no shard and are left out: 1, 2",)
    assert left_out(run, range(4)) == run
    with pytest.raises(DlprofError, match="no rank of it was read by a shard"):
        left_out(run, [])


def test_shards_are_known_by_what_they_kept(tmp_path: Path) -> None:
    run = job_of_four(tmp_path)
    for k in (0, 2):
        store = open_store(run, shard=f"{k}/3")
        store.make()
        share = replace(run, ranks=tuple(shares(run, 3)[k]))
        engine.answers_of(share, [rows], store=store, backend=serial)
    lines: list[str] = []
    measured = engine.measure(run, [rows], store=open_store(run), backend=serial, tell=lines.append)
    assert measured.ranks == tuple(range(RANKS))
    assert lines == ["1 of 4 ranks was read by no shard (shard 1/3 is missing): reading it now"]
    lines.clear()
    engine.measure(run, [rows], store=open_store(run), backend=serial, tell=lines.append)
    assert lines == []
