"""What is kept of a rank is used as long as it holds, and never where it does not."""

from __future__ import annotations

import gzip
import os
import shutil
import stat
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis import engine
from dlprof.analysis.diagnosis import wanted
from dlprof.analysis.engine import RANK, Measure, RankFacts, frames, needs, per_rank
from dlprof.analysis.engine import store as stores
from dlprof.analysis.engine.ranks import Failure, RankAnswer
from dlprof.analysis.engine.run import measure_rank, serial, travelling
from dlprof.analysis.engine.store import Kept, Store, find, open_store
from dlprof.analysis.rules import RULES
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.read.limits import NO_LIMITS
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
        broken = {"cut": whole[:-100], "flipped": bytes(flipped), "empty": b"", "another file": b"PAR1 no, JSON: {}"}
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
    original = frames.write
    odd: Any
    for odd in ([], {"answers": 1}, {"answers": {"rows": None}}, {"answers": {"rows": {"frame": []}}}, {"format": []}):

        def written(path: Path, _: Any, footer: Any, odd: Any = odd) -> None:
            original(path, {}, {**footer, **odd} if odd else {})

        shutil.rmtree(run.path / ".dlprof", ignore_errors=True)
        with monkeypatch.context() as patched:
            patched.setattr(frames, "write", written)
            store = kept(run, (rows,))
        found = store.read(run.ranks, (rows,))
        assert found.answers == {}
        assert found.again.total() == RANKS


def test_what_no_file_holds_is_not_kept_and_told(run: Run) -> None:
    store = open_store(run)
    many, lines = answered(run, store, (rows, strange))
    assert many == RANKS
    assert lines == [f"4 ranks could not be kept in {store.folder}: a value of type object"]
    assert list(store.folder.rglob("*.parquet")) == []


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
    assert store.path(300) == tmp_path / "00256-00511" / "00300.parquet"


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
