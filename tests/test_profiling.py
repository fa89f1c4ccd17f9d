"""`with dlprof.profile()`: the loop of a real process is recorded, and its verdict printed, kept and logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import dlprof
from dlprof import profiling
from dlprof.result import Proposal, Result, change
from tests.fixtures import results
from tests.fixtures.jobs import as_ranks, environment, record, rows, run_plainly, tiny
from tests.fixtures.places import ROOT

pytest.importorskip("torch", reason="recording needs torch")


def said(done: Any) -> list[str]:
    """Return what dlprof wrote on stderr."""
    return [line.removeprefix("dlprof: ") for line in done.stderr.splitlines() if line.startswith("dlprof: ")]


LOOPS = """
    import dlprof
    from dlprof.errors import DlprofError

    class Slow(TensorDataset):
        def __getitem__(self, n):
            time.sleep(0.002)
            return super().__getitem__(n)

    def loop():
        for batch in DataLoader(Slow(*data.tensors), batch_size=2):
            train(batch)

    before = dict(os.environ)
    with dlprof.profile("run", sample="off") as p:
        loop()
    assert (dict(os.environ), "pandas" in sys.modules) == (before, False)
    print(p.report, p.result.found[0].id, p.result.window.steps > 10)

    with dlprof.profile("quiet", sample="off", trace=False, quiet=True) as p:
        loop()
    print(os.path.exists("quiet/report.html"), p.report.name, os.path.exists("quiet/report.html"))

    with dlprof.profile("idle", sample="off"):
        pass
    try:
        with dlprof.profile("stopped", sample="off", trace=False):
            loop()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    sys.executable = "/nowhere"  # no report can be made
    with dlprof.profile("broken", sample="off", trace=False, log=True) as p:
        loop()
    try:
        p.result
    except DlprofError as e:
        print("/nowhere" in str(e))
"""


@pytest.mark.long
def test_each_block_ends_with_its_verdict_or_with_one_line_and_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    done = run_plainly(tiny(tmp_path, LOOPS))
    assert done.stdout.splitlines() == [
        f"{tmp_path}/run/report.html input_wait True",
        "False report.html True",
        "True",
    ]
    about, change, gain, *proof, page, idle, stopped, broken = said(done)
    assert about.startswith("train.py · 1 × CPU · ")
    assert change.endswith(".")
    assert "×" in gain
    assert [line.startswith(f"try it: dlprof try {tmp_path}/run --change ") for line in proof] in ([], [True])
    assert page == f"report: {tmp_path}/run/report.html"
    assert idle == "nothing was recorded: no backward() and no optimizer step was seen in the block"
    assert stopped == f"`dlprof report {tmp_path}/stopped` says where the time went until then"
    assert broken.startswith("no verdict: ")
    assert "/nowhere" in broken
    assert json.loads((tmp_path / "run/result.json").read_text())["run"]["exit"] == {"code": 0, "signal": None}


@pytest.mark.long
def test_under_wrap_a_block_only_marks_steps(tmp_path: Path) -> None:
    body = """
        import dlprof
        from dlprof.errors import DlprofError
        with dlprof.profile("inner") as p:
            for batch in DataLoader(data, batch_size=8):
                train(batch)
                train(batch)
                dlprof.step()
        try:
            p.result
        except DlprofError as e:
            print(e)
    """
    options = ["--no-trace", "--no-sample", "--quiet"]
    done = record(
        tiny(tmp_path, body), folder=tmp_path / "outer", options=options, env=environment(PYTHONPATH=str(ROOT))
    )
    assert done.stdout == f"there is no verdict: this process is recorded already, into {tmp_path}/outer\n"
    assert said(done) == []
    assert not (tmp_path / "inner").exists()
    trained = [row for row in rows(tmp_path / "outer/ranks/00000") if row["kind"] == "train"]
    assert [row["optimizer_steps"] for row in trained] == [2] * 8


RANKS = """
    import dlprof
    import torch.distributed as distributed
    import torch.multiprocessing as processes

    def rank(number):
        if number is not None:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PORT"])
            distributed.init_process_group("gloo", rank=number, world_size=2)
        else:
            distributed.init_process_group("gloo")
        with dlprof.profile("run", sample="off", trace=False) as p:
            for batch in DataLoader(data, batch_size=2):
                train(batch)
                time.sleep(0.02 * distributed.get_rank())  # the other ends first, and waits for it
        distributed.barrier()
        print(p.result.run.ranks, flush=True)

    if __name__ == "__main__":
        if "RANK" in os.environ:
            rank(None)
        else:
            import socket
            with socket.socket() as one:
                one.bind(("127.0.0.1", 0))
                os.environ["PORT"] = str(one.getsockname()[1])
            processes.spawn(rank, nprocs=2)
"""


@pytest.mark.long
@pytest.mark.parametrize("spawned", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_record_into_one_folder_and_rank_0_waits_for_all_and_says_so_once(spawned: bool, tmp_path: Path) -> None:
    script = tiny(tmp_path, RANKS)
    done = run_plainly(*(() if spawned else as_ranks(script)[1:-1]), script)
    assert done.stdout.replace("\n", "") == "(0, 1)" * 2
    assert [line for line in said(done) if "report: " in line] == [f"report: {tmp_path}/run/report.html"]
    assert " · 2 × CPU · " in said(done)[0]
    assert [path.name for path in tmp_path.glob("run*")] == ["run"]


def test_options_that_make_no_sense_are_refused_before_the_block() -> None:
    with pytest.raises(ValueError, match="log='wandb'"):
        dlprof.profile(log="wandb")
    with pytest.raises(TypeError, match="widow"):
        dlprof.profile(widow=1)


class Refuses:
    """A logger that cannot be written to."""

    def log_metrics(self, *_: object) -> None:
        raise OSError("the disk is full")


class Keeps:
    """A logger of another kind."""

    figures: Any = None

    def log_metrics(self, figures: dict[str, float], step: int) -> None:
        self.figures = figures, step


def test_of_trackers_one_that_fails_keeps_nothing_from_the_next() -> None:
    result, kept = results.ALL["ddp"](), Keeps()
    profiling.log_verdict(result, Path("run/report.html"), [Refuses(), kept], 7)
    assert kept.figures == (profiling.figures_of(result), 7)


def test_the_figures_that_are_logged() -> None:
    result: Result = results.ALL["ddp"]()
    assert result.window
    first = Proposal(change("num_workers=6"), ("input_wait",), "step", 100.0, 80.0, 1.25)
    figures = profiling.figures_of(replace(result, changes=(first,), window=replace(result.window, mfu=0.4)))
    waits = [part.share for part in result.time if part.category == "input_wait"]
    expected = {
        "dlprof/first_change_speedup": 1.25,
        "dlprof/step_ms": result.window.step_ns / 1e6,
        "dlprof/mfu": 0.4,
        "dlprof/input_wait_share": pytest.approx(sum(waits) / len({part.rank for part in result.time})),
    }
    assert {name: figures[name] for name in expected} == expected
    assert profiling.figures_of(replace(result, window=None, time=(), changes=())) == {}
