"""Reading writes nothing into a folder of traces, and into a recorded run its report alone; asked for or not."""

from __future__ import annotations

import shlex
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

import dlprof
from dlprof.analysis.engine import store
from dlprof.cli import cli
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.claims import add_facts
from tests.fixtures.places import TRACES
from tests.fixtures.runs import CPU, MS

# What is typed, PATH being what is read.
READING = (
    "report PATH",
    "report PATH --shard 0/1",
    "export PATH --csv tables",
    "export PATH --perfetto all.json.gz",
    "compare PATH PATH",
    "whatif PATH --device 2x -o there",
    "check PATH --max input_wait<99%",
    "check-advice PATH 'use channels_last'",
    "hang PATH",
)


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Return everything below a folder, with its size and when it was written to."""
    return {
        path.relative_to(folder).as_posix(): ((at := path.stat()).st_size, at.st_mtime_ns)
        for path in (folder, *folder.rglob("*"))
        if not path.is_symlink()
    }


def made(kind: str, folder: Path) -> Path:
    """Return a folder of traces, a single trace, or a recorded run."""
    if kind == "a recorded run":
        steps = [runs.light(n, 100 * MS, fetch_ns=40 * MS) for n in range(12)]
        return runs.recorded(folder / "run", (traces.training(3), steps, CPU), (None, steps, CPU))
    for rank in range(2):
        traces.write(folder / "job" / f"rank{rank}.json", traces.training(rank=rank, world_size=2))
    return folder / "job" / "rank0.json" if kind == "a trace" else folder / "job"


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        *(("a recorded run", line) for line in READING),
        *(("a folder of traces", line) for line in READING[:2]),
        *(pytest.param("a folder of traces", line, marks=pytest.mark.slow) for line in READING[2:]),
        *(pytest.param("a trace", line, marks=pytest.mark.slow) for line in READING[:2]),
    ],
)
def test_reading_writes_nothing_but_what_is_asked_for(
    kind: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "LARGE_RANKS", 0)  # what is known of each rank is kept
    path = made(kind, tmp_path / "read")
    before = listing(tmp_path / "read")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = [str(path) if word == "PATH" else word for word in shlex.split(line)]
    if words[0] not in ("check", "check-advice", "hang"):
        words += ["--jobs", "1"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code in (0, 1, 3), (done.exception, done.output)
    after = listing(tmp_path / "read")
    reads = words[0] in ("report", "compare", "check", "check-advice")
    if kind != "a recorded run":
        assert after == before
        assert bool(list((tmp_path / "cache").rglob("*.npz"))) is reads
        return
    mine = {name.split("/")[1] for name in after.keys() - before.keys()}
    of_report = {"report.html", "result.json"} if line == "report PATH" else set()
    assert mine == of_report | ({".dlprof"} if reads else set())
    assert {name: of for name, of in after.items() if name in before and name != "run"}.items() <= before.items()
    assert not (tmp_path / "cache").exists()


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param("dlrm_v100_8ranks", marks=pytest.mark.slow), "nsys"])
def test_nothing_is_written_beside_real_traces_by_what_python_is_asked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (TRACES / name).is_dir():
        pytest.skip(f"needs {name} beside the repository")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = listing(TRACES / name)
    run = dlprof.open(TRACES / name)
    assert run.result.run.ranks == run.ranks
    for frame in run.frames()["name"]:
        with suppress(NotMeasured):
            run.frame(frame)
    for figure in run.figures()["name"]:
        run.figure(figure)
    run._repr_html_()
    assert listing(TRACES / name) == before
    assert not (tmp_path / "cache").exists()


def part(folder: Path, ranks: list[int], **told: object) -> Path:
    """Record three ranks; keep some of them."""
    steps = [runs.light(n, 100 * MS, fetch_ns=40 * MS) for n in range(12)]
    run = runs.recorded(folder, *((None, steps, {**CPU, "rank": rank, "world_size": 3}) for rank in range(3)))
    add_facts(run, "run.json", **told)
    for rank in {0, 1, 2} - set(ranks):
        shutil.rmtree(run / f"ranks/{rank:05d}")
    return run


@pytest.mark.parametrize(
    ("ranks", "told", "said"),
    [
        ([[0], [2, 1]], {}, "3 × CPU"),
        ([[0], [2]], {}, "1 of 3 ranks is missing: 1"),
        ([[0, 1], [1, 2]], {}, "both hold rank 00001: they are not parts of one run"),
        ([[0], [1]], {"command": ["python", "other.py"]}, "are of different jobs: report on one at a time"),
        ([[0], [1]], {"batch": "SLURM job 9"}, "are of different jobs: report on one at a time"),
    ],
)
def test_parts_of_one_run_are_read_as_one(
    ranks: list[list[int]], told: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = part(tmp_path / "h1", ranks[0]), part(tmp_path / "h2", ranks[1], **told)
    before = listing(tmp_path)
    done = CliRunner().invoke(cli, ["report", "h1", "h2", "--quiet", "--jobs", "1"])
    assert said in done.output, done.output
    one = tmp_path / "dlprof-report"
    if done.exit_code:
        assert (done.exit_code, one.exists()) == (2, False)
        return
    assert {path.name for path in (one / "ranks").iterdir()} == {f"{rank:05d}" for of in ranks for rank in of}
    assert (one / "report.html").exists()
    assert {name: of for name, of in listing(tmp_path).items() if name in before and name != "."} == {
        name: of for name, of in before.items() if name != "."
    }
    assert CliRunner().invoke(cli, ["report", str(first), str(second / "ranks"), "--quiet"]).exit_code == 2
