"""`dlprof bandwidth` measures on this host, prints a table, saves it where reports find it, and says its mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from dlprof.cli import cli
from dlprof.result.bandwidth import from_json
from tests.fixtures.jobs import DLPROF, environment, launch

SHORT = ("bandwidth", "--procs", "2", "--sizes", "4K,64K", "--iterations", "3", "--warmup", "1")


@pytest.mark.long
def test_two_ranks_of_this_host(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="exchanging needs torch")
    done = launch([*DLPROF, *SHORT], tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    rows = [line for line in lines if line[:1] in (["all_reduce"], ["send_recv"]) and "kB" in line]
    assert [(row[0], row[3]) for row in rows] == [
        ("all_reduce", "1,024"),
        ("all_reduce", "16,384"),
        ("send_recv", "1,024"),
        ("send_recv", "16,384"),
    ]
    assert "saved: runs/bandwidth-gloo-2-ranks-1-hosts.json" in done.stdout
    assert "dlprof: 2 CPU ranks" in done.stderr
    measured = from_json(json.loads((tmp_path / "runs/bandwidth-gloo-2-ranks-1-hosts.json").read_text()))
    assert measured.state == "complete"
    assert {t.correct for t in measured.timings} == {True}


@pytest.mark.long
def test_json_alone_and_into_a_run(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="exchanging needs torch")
    (tmp_path / "run").mkdir()
    done = launch(
        [*DLPROF, *SHORT, "--collectives", "all_reduce", "--into", "run", "--format", "json", "--quiet"], tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert json.loads((tmp_path / "run/bandwidth-gloo-2-ranks-1-hosts.json").read_text()) == data
    assert [f["collective"] for f in data["fits"]] == ["all_reduce"]


@pytest.mark.long
def test_what_cannot_be_saved_is_printed_and_then_told(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="exchanging needs torch")
    (tmp_path / "runs").write_text("a file")
    done = launch([*DLPROF, *SHORT, "--collectives", "all_reduce", "--quiet"], tmp_path)
    assert done.returncode == 1
    assert "all_reduce reaches" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("dlprof: runs/bandwidth-gloo-2-ranks-1-hosts.json cannot be written: ")


@pytest.mark.long
def test_sigterm_ends_all_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="exchanging needs torch")
    words = [*DLPROF, "bandwidth", "--procs", "2", "--sizes", "1K..64M*2", "--iterations", "1000"]
    process = subprocess.Popen(
        words, cwd=tmp_path, env=environment(TMPDIR=str(tmp_path)), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    for line in process.stderr:
        if b"up to" in line:  # they measure
            break
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--sizes", "4K..1K"), 2, "no range of sizes"),
        (("--dtype", "float"), 2, "it is one of float64"),
        (("--collectives", "broadcast"), 2, "there are: all_reduce"),
        (("--procs", "2", "--gpus", "2"), 2, "exclude each other"),
        (("--into", "x", "--out", "y"), 2, "exclude each other"),
        (("--into", "no/such"), 1, "there is no such folder"),
        (("--gpus", "900"), 1, "--gpus 900: there is no more than"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(
    words: tuple[str, ...], code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="exchanging needs torch")
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI_")) or name in ("WORLD_SIZE", "RANK"):
            monkeypatch.delenv(name)
    done = CliRunner().invoke(cli, ["bandwidth", *words])
    assert done.exit_code == code
    assert says in done.stderr


def test_options_that_start_ranks_are_none_of_a_launchers_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = CliRunner().invoke(cli, ["bandwidth", "--procs", "2"])
    assert (done.exit_code, "a launcher has started this" in done.stderr) == (2, True)
