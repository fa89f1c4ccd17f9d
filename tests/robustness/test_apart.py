"""Processes of one job that train side by side without a process group are all recorded, read and judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlprof.analysis.machine.cores import core_waits
from dlprof.read.run import open_run
from tests.fixtures.jobs import facts, record, rows, tiny
from tests.fixtures.runs import measured

HOGWILD = """
    def both(number, meeting):
        train(data[:8])
        meeting.wait()
        for _ in range(60):
            train(data[:8])
            time.sleep(0.02)
        meeting.wait()

    if __name__ == "__main__":
        import torch.multiprocessing as mp
        spawning = mp.get_context("spawn")
        meeting = spawning.Barrier(2)
        mp.spawn(both, (meeting,), nprocs=2)
    """


@pytest.mark.long
def test_two_processes_without_a_group_are_two_ranks(tmp_path: Path) -> None:
    script = tiny(tmp_path, HOGWILD)
    done = record(script, folder=tmp_path / "run", options=["--sample", "0.25"])
    assert "another process" not in done.stderr
    ranks = sorted((tmp_path / "run/ranks").iterdir())
    assert [rank.name for rank in ranks] == ["00000", "00001"]
    assert [(facts(rank)["rank"], facts(rank)["alone"], facts(rank)["world_size"]) for rank in ranks] == [
        (0, True, 1),
        (1, True, 1),
    ]
    assert all(len(rows(rank)) >= 60 for rank in ranks)
    told = open_run(tmp_path / "run")
    assert told.warnings == ()
    run = measured(tmp_path / "run", core_waits)
    assert (run.job.ranks, run.job.world_size, run.job.apart) == ((0, 1), 2, True)
    # Both have the readings of their own threads.
    frame = run.frame(core_waits)
    assert frame["threads"].to_list() == [1, 1]
    assert frame[["waited", "pool_waited"]].notna().all(axis=None)
    host = json.loads(next((tmp_path / "run/hosts").glob("*/host.jsonl")).read_text().splitlines()[-1])
    assert host["job_cpu_s"] > 0


@pytest.mark.slow
def test_one_after_the_other_are_no_ranks_of_one_job(tmp_path: Path) -> None:
    """As of a script that trains several times in processes of its own: the first is read, and the others named."""
    body = """
        def once(number):
            for _ in range(20): train(data[:8])

        if __name__ == "__main__":
            for _ in range(2):
                torch.multiprocessing.spawn(once, nprocs=1)
        """
    record(tiny(tmp_path, body), folder=tmp_path / "run", options=["--no-trace"])
    first, second = sorted((tmp_path / "run/ranks").iterdir())
    assert (first.name, second.name) == ("00000", f"00000.{facts(second)['pid']}")
    run = open_run(tmp_path / "run")
    assert [rank.index for rank in run.ranks] == [0]
    assert any(second.name in warning for warning in run.warnings)
