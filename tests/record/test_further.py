"""A job traces some steps again: asked while it runs, or as its steps have become slower, and never else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dlprof.analysis import notices
from dlprof.cli import cli
from dlprof.files import write
from dlprof.read.run import TRACE, open_run
from dlprof.record.further import Lengths
from tests.fixtures import runs
from tests.fixtures.in_process import run_recorded
from tests.fixtures.jobs import COMPILES_NOTHING, as_ranks, environment, facts, rows, spawned, until, wrapped
from tests.fixtures.sampling import leave_word

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

MS = 1_000_000


def run_dlprof(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [*map(str, words)])


def refused(*words: str | Path) -> str:
    """Return the one line with which a command fails."""
    done = run_dlprof(*words)
    assert (done.exit_code, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    return str(line)


def alternating(n: int) -> float:
    """Return the steps of four workers that cannot keep up: one of four waits."""
    return 1.0 if n % 4 else 30.0


# How long each step takes, in ms, how many there are, and whether they have become slower and stay so.
LENGTHS: Mapping[str, tuple[Callable[[int], float], int, bool]] = {
    "as ever": (lambda _: 100.0, 500, False),
    "half as long again from some step on": (lambda n: 150.0 if n > 120 else 100.0, 200, True),
    "a little longer": (lambda n: 120.0 if n > 120 else 100.0, 500, False),
    "shorter": (lambda n: 50.0 if n > 120 else 100.0, 500, False),
    "slower after too few steps": (lambda n: 150.0 if n > 30 else 100.0, 60, False),
    "for a short while": (lambda n: 30.0 if 120 < n < 160 else 10.0, 500, False),
    "fast steps, and not for long yet": (lambda n: 4.0 if n > 120 else 1.0, 300, False),
    "fast steps, for long": (lambda n: 4.0 if n > 120 else 1.0, 900, True),
    "a checkpoint now and then": (lambda n: 9_000.0 if n > 150 and n % 50 == 7 else 100.0, 1_000, False),
    "a loader that is behind all along": (alternating, 1_000, False),
    "and falls further behind": (lambda n: alternating(n) * (3 if n > 400 else 1), 1_000, True),
    "each a little longer than the one before": (lambda n: 100.0 + n, 600, True),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_steps_that_have_become_slower_and_stay_so(name: str) -> None:
    of, steps, slower = LENGTHS[name]
    lengths, now = Lengths(), 0
    for n in range(steps):
        dur = round(of(n) * MS)
        now += dur
        lengths.see(dur, now)
    assert lengths.slower == slower


# -- two ranks, asked while they train

TRAINING = """
    import itertools, os, sys, time
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, most = dist.get_rank(), int(sys.argv[1])
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with open(f"losses-{rank}", "w") as file:
        for n in range(most):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 8)).square().mean()
            loss.backward()
            optimizer.step()
            print(loss.item().hex(), file=file)
            if most > 5_000:
                time.sleep(0.02)
                over = torch.tensor(float(os.path.exists("done")))
                dist.all_reduce(over)
                if over:
                    break
                if n == 30 and rank == 0:
                    open("up", "w").close()
    dist.destroy_process_group()
"""

_PLAIN_STEPS = 1_500  # more than the recorded job makes, whose steps take 20 ms or more


class Two:
    """A job of two ranks that was asked for further windows twice, and what it said; it has ended since."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.ranks = [self.run / "ranks" / f"{rank:05d}" for rank in range(2)]
        script = folder / "train.py"
        script.write_text(COMPILES_NOTHING + dedent(TRAINING))
        quiet = {"env": environment(), "cwd": folder, "stdout": -3, "stderr": -3}
        plainly = folder / "plain"
        plainly.mkdir()
        with (
            spawned(as_ranks(script, str(_PLAIN_STEPS)), **quiet | {"cwd": plainly}),
            spawned(wrapped(self.run, as_ranks(script, "100000"), "--no-sample", "--flops", "off"), **quiet),
        ):
            assert until((folder / "up").exists)
            self.asked = [run_dlprof("window", self.run, "--steps", "3")]
            self.meanwhile = refused("window", self.run)
            assert until(lambda: self.states() == ["exported"])
            self.asked.append(run_dlprof("window", self.run))
            assert until(lambda: self.states() == ["exported"] * 2)
            (folder / "done").touch()
        self.losses = [(folder / f"losses-{rank}").read_text() for rank in range(2)]
        self.plain = [(plainly / f"losses-{rank}").read_text() for rank in range(2)]

    def states(self) -> list[str] | None:
        """Return the states of the further windows; None: the ranks differ yet."""
        found = [[w["state"] for w in facts(rank)["windows"]] for rank in self.ranks]
        return found[0] if found[0] == found[1] else None


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    return Two(tmp_path_factory.mktemp("two"))


@pytest.mark.long
def test_both_ranks_trace_the_steps_that_were_asked_for(two: Two) -> None:
    windows = [facts(rank)["windows"] for rank in two.ranks]
    steps = [[(w["number"], w["first_step"], w["last_step"], w["why"], w["trace"]) for w in of] for of in windows]
    assert steps[0] == steps[1]
    assert [(number, last - first + 1, why) for number, first, last, why, _ in steps[0]] == [
        (2, 3, "asked"),
        (3, 5, "asked"),
    ]
    for rank in two.ranks:
        assert facts(rank)["warnings"] == []
        assert facts(rank)["window"]["state"] == "exported"
        marked = {row["step"] for row in rows(rank) if row["profiled"]}
        assert {n for _, first, last, *_ in steps[0] for n in range(first - 1, last + 2)} <= marked
        assert sorted(p.name for p in rank.glob("trace*")) == ["trace-2.json.gz", "trace-3.json.gz", "trace.json.gz"]
    for done, (number, first, last, *_) in zip(two.asked, steps[0], strict=True):
        assert (done.exit_code, done.stderr) == (0, "")
        assert f"steps {first:,} to {last:,}, as window {number}" in done.stdout
        assert done.stdout.splitlines()[-1] == f"Then: dlprof report {two.run} --window {number}"


@pytest.mark.long
def test_the_training_is_the_same_to_the_bit(two: Two) -> None:
    for ours, plain in zip(two.losses, two.plain, strict=True):
        assert plain.startswith(ours)
        assert ours.count("\n") > facts(two.ranks[0])["windows"][-1]["last_step"]


@pytest.mark.long
def test_who_asks_again_too_soon_or_too_late_is_told(two: Two) -> None:
    assert "a window is due already: steps" in two.meanwhile
    assert "the job has ended" in refused("window", two.run)


@pytest.mark.long
def test_each_window_can_be_read(two: Two, tmp_path: Path) -> None:
    windows = facts(two.ranks[0])["windows"]
    for number, name in ((None, "trace"), (1, "trace"), (2, "trace-2"), (3, "trace-3")):
        run = open_run(two.run, number)
        assert [rank.files[TRACE].name for rank in run.ranks] == [f"{name}.json.gz"] * 2
        assert run.warnings == ()
        assert [rank.facts["window"].get("number") for rank in run.ranks] == [
            None if name == "trace" else int(name[-1])
        ] * 2
    words = ["--format", "json", "--quiet", "--jobs", "1", "-o", str(tmp_path)]
    result = json.loads(run_dlprof("report", two.run, "--window", "2", *words).stdout)
    (again,) = (text for text in result["run"]["warnings"] if "traced again" in text)
    assert any(f"steps {w['first_step']:,} to {w['last_step']:,}" in again for w in windows)
    assert "--window 3" in again
    assert "its windows: 1 to 3" in refused("report", two.run, "--window", "4", *words)


# -- one process that asks itself

# It ends once its further window has the state that is waited for, or after so many steps.
LOOP = """
    import json, time
    from pathlib import Path
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset
    from dlprof.live.window import ask

    class Data(Dataset):
        def __len__(self):
            return 100_000
        def __getitem__(self, n):
            SLEEP
            return torch.randn(4, 8)

    def state():
        windows = json.loads(Path("run/ranks/00000/facts.json").read_text())["windows"]
        return windows[-1]["state"] if windows else ""

    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for n, batch in enumerate(DataLoader(Data(), batch_size=None)):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        time.sleep(0.002)
        LINE
        if n % 10 == 9 and n > 40 and state() == "exported" or n >= MOST:
            break
    for n in range(5):
        model(batch).square().mean().backward()
        optimizer.step()
"""
ASKS = "n == 20 and ask(Path('run'), 4, answer_s=0)"


def loop(line: str = "pass", sleep: str = "pass", most: int = 3_000) -> str:
    return dedent(LOOP).replace("LINE", line).replace("SLEEP", sleep).replace("MOST", str(most))


@pytest.mark.long
def test_a_job_without_a_trace_can_be_asked(tmp_path: Path) -> None:
    run_recorded(tmp_path, loop(ASKS))
    rank = tmp_path / "run/ranks/00000"
    told = facts(rank)
    (window,) = told["windows"]
    assert (told["window"]["state"], window["state"], window["number"]) == ("off", "exported", 2)
    assert window["last_step"] - window["first_step"] == 3
    (read,) = open_run(tmp_path / "run").ranks
    assert (read.files[TRACE].name, read.facts["window"]["number"]) == ("trace-2.json.gz", 2)
    assert rows(rank, "modules")


@pytest.mark.long
def test_a_profiler_of_the_scripts_own_comes_first(tmp_path: Path) -> None:
    theirs = f"""{ASKS}
    if n == 20:
        profiler = torch.profiler.profile()
        profiler.__enter__()
    if n > 20 and profiler is not None and state() == "yielded":
        until, profiler = profiler.__exit__(None, None, None) or n, None"""
    script = run_recorded(tmp_path, loop(theirs), warnings=1)
    told = facts(tmp_path / "run/ranks/00000")
    (window,) = told["windows"]
    assert window["state"] == "exported"
    assert window["first_step"] >= script["until"]
    assert window["last_step"] - window["first_step"] == 3
    assert len(told["window"]["theirs"]) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("most", "options", "opens"),
    [
        (3_000, {"trace": True}, True),
        pytest.param(
            240, {"window": (5, 1, 2)}, False, marks=pytest.mark.slow
        ),  # who names a window wants no other one
    ],
)
def test_a_window_opens_by_itself_where_steps_have_become_slower(
    most: int, options: dict[str, Any], opens: bool, tmp_path: Path
) -> None:
    run_recorded(tmp_path, loop(sleep="time.sleep(0.03 if n > 120 else 0)", most=most), **options)
    told = facts(tmp_path / "run/ranks/00000")
    assert [(w["state"], w["why"], w["number"]) for w in told["windows"]] == [("exported", "slower", 2)] * opens
    said = runs.measured(tmp_path / "run", notices.warnings).call(notices.warnings)
    again = [text for text in said if "traced again" in text]
    assert len(again) == opens
    for text in again:
        assert f"steps {told['windows'][0]['first_step']:,} to " in text
        assert "because they took" in text
        assert "the loader's wait grew from" in text
        assert "--window 2" in text


# -- who cannot be asked


def none_yet(run: Path) -> None:
    (run / "ranks").mkdir(parents=True)
    write(run / "run.json", json.dumps({"format": 1, "start_ns": 1}))


def gone(run: Path) -> None:
    """Leave what a job leaves that was killed."""
    runs.recorded(run, (None, [], {}), end_ns=None)
    leave_word(run, "00000", 1, since=0)


def running(**told: Any) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        runs.recorded(run, (None, [], told), end_ns=None)
        leave_word(run, "00000", os.getpid())

    return make


DUE = {"number": 2, "state": "waiting", "first_step": 4_010, "last_step": 4_014}
REFUSED: Mapping[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (lambda _: None, "no such file or folder"),
    "no run": (Path.mkdir, "no run folder of dlprof"),
    "no rank yet": (none_yet, "no rank of the job trains yet"),
    "it has ended": (lambda run: runs.recorded(run, (None, [], {})), "the job has ended"),
    "it was killed": (gone, "no rank of the job runs any more"),
    "its ranks have ended": (running(ended="exit"), "the job has ended"),
    "under nsys": (running(window={"state": "nsys"}), "runs under nsys"),
    "one is due": (running(windows=[DUE]), "a window is due already: steps 4,010 to 4,014"),
    "too many": (running(windows=[{**DUE, "state": "exported"}] * 4), "its 5 trace windows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_asked_is_said_in_one_line(name: str, tmp_path: Path) -> None:
    make, why = REFUSED[name]
    make(tmp_path / "run")
    assert why in refused("window", tmp_path / "run")
    assert not (tmp_path / "run/ask-window.json").exists()
