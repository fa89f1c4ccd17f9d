"""The checks on a GPU: none costs another its row, no job outlives its time, and what comes home names nobody."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from base64 import b64decode, b64encode
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import (
    faults,
    fixtures,
    jobs,
    overhead,
    patches,
)
from benchmarks.gpu.jobs import Ended, python, run
from dlprof.commands.run import constant, count_gpus, workloads
from tests.fixtures.jobs import is_running, spawned

# Checks as a module of its own lists them. What they do to get out of hand is real; the figures are none.
MODULE = """
import os, subprocess, sys, time
from pathlib import Path
from benchmarks.gpu.checks import Check
from benchmarks.gpu.outcome import holds, skipped

def fine(bench):
    bench.add(holds("one", True, ""), skipped("two", "one GPU"), anywhere=True)

def wrong(bench):
    bench.add(holds("one", True, ""), holds("three", False, f"in {Path.cwd()}"), anywhere=True)

def breaks(bench):
    bench.add(holds("before", True, ""), anywhere=True)
    raise RuntimeError("a check with a mistake")

def dies(bench):
    os.kill(os.getpid(), 11)

def hangs(bench):
    bench.add(holds("before", True, ""), anywhere=True)
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    Path(os.environ["LEFT"]).write_text(str(child.pid))
    time.sleep(300)

CHECKS = (
    Check("fine", "", fine, 60, 1),
    Check("wrong", "", wrong, 60, 1),
    Check("breaks", "", breaks, 60, 1),
    Check("dies", "", dies, 60, 1),
    Check("hangs", "", hangs, 4, 1),
    Check("long", "", fine, 600, 500, reserved_s=1),
)
"""


def checks_command(tmp_path: Path, *options: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs the checks of MODULE, and its environment."""
    (tmp_path / "made_up_checks.py").write_text(MODULE)
    words = ["-m", "benchmarks.gpu", "--rehearse", "--checks", "made_up_checks", "--out", str(tmp_path / "out")]
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{jobs.ROOT}", "LEFT": str(tmp_path / "left")}
    return [sys.executable, *words, *options], env


def rows_told(tmp_path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((tmp_path / "out" / "rehearsal-gpu.json").read_text())
    return data


@pytest.mark.slow
def test_what_breaks_dies_or_hangs_costs_its_own_row(tmp_path: Path) -> None:
    words, env = checks_command(tmp_path, "--minutes", "2")
    done = subprocess.run(words, cwd=jobs.ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    data = rows_told(tmp_path)
    rows = {row["check"]: row for row in data["checks"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        "fine": "rehearsed",
        "wrong": "failed",
        "breaks": "failed",
        "dies": "failed",
        "hangs": "failed",
        "long": "skipped",
    }
    assert rows["breaks"]["why"] == "RuntimeError: a check with a mistake"
    assert [part["name"] for part in rows["breaks"]["parts"]] == ["before"]
    assert [part["name"] for part in rows["hangs"]["parts"]] == ["before"]
    assert "not done" in rows["hangs"]["why"]
    assert "no time left" in rows["long"]["why"]
    assert not is_running(int((tmp_path / "left").read_text()))
    # Nothing that was rehearsed lies where results do, and where it ran is told in none of it.
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"rehearsal-gpu.json", "rehearsal-README.md", "rehearsal-log.txt"}
    assert all(str(jobs.ROOT) not in path.read_text() for path in (tmp_path / "out").iterdir())
    # The end of the log says what failed and why.
    assert any("FAILED breaks: RuntimeError" in text for text in done.stdout.splitlines()[-6:])
    assert data["rehearsal"] is True


@pytest.mark.long
def test_a_run_that_is_cut_off_leaves_what_it_has_and_nothing_running(tmp_path: Path) -> None:
    words, env = checks_command(tmp_path, "--only", "fine", "hangs", "--minutes", "2")
    with spawned(words, cwd=jobs.ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "left").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        # A check that has not ended stands as such in what is there already.
        assert [row["state"] for row in rows_told(tmp_path)["checks"]] == ["rehearsed", "running"]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 1
    states = {row["check"]: (row["state"], row["why"]) for row in rows_told(tmp_path)["checks"]}
    assert states == {"fine": ("rehearsed", states["fine"][1]), "hangs": ("failed", "interrupted")}
    assert not is_running(int((tmp_path / "left").read_text()))


def test_every_fault_of_every_workload_is_planted_or_said_why_not() -> None:
    planted = {(group.workload, fault) for group in faults.GROUPS for fault in group.faults}
    known = {(script.stem, fault) for script in workloads() for fault in constant(script, "FAULTS") or {}}
    elsewhere = {(w, f) for w, f in known if (w, f) in faults.ELSEWHERE or (w, "*") in faults.ELSEWHERE}
    assert planted | elsewhere == known
    assert not planted & elsewhere


@pytest.mark.slow
def test_a_job_that_hangs_is_ended_with_what_left_its_group_and_ignores_signals(tmp_path: Path) -> None:
    body = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
away = "import os, signal, time; os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN);"
away += "open({str(tmp_path / "away")!r}, 'w').write(str(os.getpid())); time.sleep(300)"
subprocess.Popen([sys.executable, "-c", away])
print("begun", flush=True)
time.sleep(300)
"""
    began = time.monotonic()
    ended = run(python("-c", body), tmp_path, 3.0)
    assert ended.code is None
    assert time.monotonic() - began < 100
    assert [text for _, text in ended.lines] == ["begun"]
    assert "ended after 3 s" in ended.errors
    pid = int((tmp_path / "away").read_text())
    assert pid != os.getpid()
    assert not is_running(pid)


UUID = "1b0f5a0e-9d3c-4c44-a3c5-5f8ad2d0a001"
BOOT = "36470f32-3105-4e6a-ad0d-f006da8138f0"
MACHINE: dict[str, Any] = {
    "torch": {"gpus": [{"name": "NVIDIA H200", "uuid": f"GPU-{UUID}"}], "torch": "2.11.0+cu130", "cuda": "13.0"},
    "driver": [{"uuid": f"GPU-{UUID}", "driver_version": "580.1"}],
}


def run_folder(at: Path, host: str = "node-17.cluster.example", **facts: Any) -> Path:
    """Make a run as dlprof leaves it, on a host of that name."""
    run = at / "run"
    rank = run / "ranks" / "00000"
    rank.mkdir(parents=True)
    here = run / "hosts" / host
    here.mkdir(parents=True)
    command = ["/opt/venv/bin/python", str(at / "train.py")]
    (run / "run.json").write_text(json.dumps({"command": command, "cwd": str(at), "hosts": [host]}))
    told = {"host": host, "boot": BOOT, "env": {"PYTORCH_ALLOC_CONF": "x:1", "NCCL_SOCKET_IFNAME": "eth7"}, **facts}
    (rank / "facts.json").write_text(json.dumps({**told, "device": {"uuid": UUID}}))
    (rank / "records.jsonl").write_text('{"log":"steps","step":0,"kind":"train","dur_ns":5}\n')
    stacks = b64encode(gzip.compress(f"main ({at}/train.py:3) 7\n".encode())).decode()
    (here / "stacks.jsonl").write_text(f'{{"log":"stacks","rank":"00000","gzip":"{stacks}"}}\n')
    trace = {"host_name": host, "traceEvents": [{"ts": 1795419847990977.339, "name": f"open {at}/data"}]}
    (rank / "trace.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    (here / "samples.jsonl").write_text('{"log":"gpu","rank":"00000","at_ns":1,"power_w":612.5}\n')
    (here / "notes-aaaaaaaa.jsonl").write_text('{"log":"hello","pid": 1}\n')
    (run / "result.json").write_text("{}")
    return run


def texts(folder: Path) -> dict[str, str]:
    """Return the text of every file below a folder, by its path."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            raw = path.read_bytes()
            found[path.relative_to(folder).as_posix()] = (
                gzip.decompress(raw) if path.suffix == ".gz" else raw
            ).decode()
    return found


def test_nothing_that_names_the_machine_is_kept_and_every_figure_is(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "work")
    oracle = {"judge": "device", "uuid": UUID, "step_ms": 40.25, "log": str(tmp_path / "work" / "a.log")}
    fixtures.keep(run, tmp_path / "kept", oracle, MACHINE)
    found = texts(tmp_path / "kept")
    everything = "\n".join([*found, *found.values()])
    names = ("node-17", "cluster.example", UUID, BOOT, "eth7", "/opt/venv", str(tmp_path), str(jobs.ROOT))
    assert [name for name in names if name in everything and name != "/opt/venv"] == []
    rank = "ranks/00000"
    assert set(found) == {
        "hosts/host/samples.jsonl",
        "hosts/host/stacks.jsonl",
        "oracle.json",
        f"{rank}/facts.json",
        f"{rank}/records.jsonl",
        f"{rank}/trace.json.gz",
        "run.json",
    }
    # A line that the stacks stand at is found again.
    stacks = json.loads(found["hosts/host/stacks.jsonl"])
    assert (stacks["log"], stacks["rank"]) == ("stacks", "00000")
    assert gzip.decompress(b64decode(stacks["gzip"])) == b"main (here/train.py:3) 7\n"
    # Figures are as they were; what must agree with each other still does.
    assert json.loads(found["hosts/host/samples.jsonl"])["power_w"] == 612.5
    facts, told = json.loads(found[f"{rank}/facts.json"]), json.loads(found["oracle.json"])
    assert facts["env"] == {"PYTORCH_ALLOC_CONF": "x:1"}
    assert facts["device"]["uuid"] == told["uuid"]
    assert told["step_ms"] == 40.25
    assert told["machine"]["gpus"] == ["NVIDIA H200"]
    assert json.loads(found["run.json"])["hosts"] == ["host"]


def kept(at: Path, name: str, size: int) -> Path:
    folder = at / name
    (folder / "ranks" / "00000").mkdir(parents=True)
    (folder / "oracle.json").write_text(json.dumps({"judge": "counted"}))
    (folder / "ranks" / "00000" / "trace.json.gz").write_bytes(os.urandom(size))
    return folder


def test_recordings_are_packed_into_few_archives_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixtures, "MOST_ARCHIVE_BYTES", 100_000)
    monkeypatch.setattr(fixtures, "MOST_ARCHIVES", 2)
    sizes = {"a": 60_000, "b": 60_000, "c": 30_000, "d": 90_000, "e": 200_000}
    folders = [kept(tmp_path / "kept", name, size) for name, size in sizes.items()]
    out = tmp_path / "out"
    out.mkdir()
    (out / "recordings-nvidia_h200-7.tar.gz").write_bytes(b"of an earlier call")
    paths, left_out = fixtures.pack(folders, out, "NVIDIA H200")
    # a and c fit together, b is the second, and for d there is no third archive; e fits in none.
    assert [p.name for p in paths] == ["recordings-nvidia_h200-1.tar.gz", "recordings-nvidia_h200-2.tar.gz"]
    assert fixtures.archives(out) == paths
    assert left_out == ["d", "e"]
    assert all(p.stat().st_size <= 100_000 for p in paths)
    back = [one.name for n, path in enumerate(paths) for one in fixtures.unpack(path, tmp_path / f"back{n}")]
    assert sorted(back) == ["a", "b", "c"]
    trace = "ranks/00000/trace.json.gz"
    assert (tmp_path / "back0" / "a" / trace).read_bytes() == (tmp_path / "kept" / "a" / trace).read_bytes()
    # The same recordings are the same bytes, whoever packs them and when.
    before = [p.read_bytes() for p in paths]
    os.utime(folders[0] / trace, (1, 1))
    assert [p.read_bytes() for p in fixtures.pack(folders, out, "NVIDIA H200")[0]] == before


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil"])
def test_an_archive_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "recordings-x-1.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(ValueError, match="no file of a recording"):
        fixtures.unpack(path, tmp_path / "to")
    assert not (tmp_path / "evil").exists()


@pytest.mark.long
@pytest.mark.skipif(count_gpus() > 0, reason="there is a GPU here")
def test_without_a_gpu_the_command_says_so_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--out", str(out)],
        cwd=jobs.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("no GPU: torch ")
    assert done.stderr.count("\n") == 1
    assert not out.exists()


LOG = """
10.000000000 cudaMemcpyAsync
10.100000000 cudaStreamSynchronize
10.300000000 cudaMemcpyAsync
10.400000000 cudaMemcpyAsync
10.500000000 cudaEventSynchronize
10.600000000 cudaMemcpyAsync
half a li
"""


def job_lines(*lines: tuple[float, str]) -> Ended:
    return Ended((), 0, 1.0, lines, "")


def test_calls_are_those_between_two_reads_of_the_loss_whenever_their_lines_came() -> None:
    # The line of the first read came when the next step had begun to copy already.
    ended = job_lines((10.35, "step 40  loss 2"), (10.55, "step 80  loss 1"))
    assert overhead.between_lines(LOG, ended, 40, 80) == {"cudaMemcpyAsync": 2, "cudaEventSynchronize": 1}
    with pytest.raises(ValueError, match="no line of step 80"):
        overhead.between_lines(LOG, job_lines((10.35, "step 40")), 40, 80)
    with pytest.raises(ValueError, match="did not wait"):
        overhead.between_lines(LOG, job_lines((10.05, "step 40"), (10.55, "step 80")), 40, 80)
    # Nothing was seen at all: that is for the judge to say.
    assert overhead.between_lines("", ended, 40, 80) == {}


def states(counts: dict[str, Counter[str]], reads: int = 2) -> dict[str, str]:
    return {part.name: part.state for part in overhead.of_calls(counts, reads)}


def test_one_more_wait_than_without_dlprof_fails() -> None:
    plain = Counter({"cudaStreamSynchronize": 2, "cudaMemcpyAsync": 42})
    same = {way: Counter(plain) for way in overhead.WAYS}
    assert set(states(same).values()) == {"passed"}
    for name in ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaMemcpyAsync", "cudaDeviceSynchronize"):
        more = {**same, "light": plain + Counter({name: 1})}
        assert [part for part, state in states(more).items() if state == "failed"] == ["light: calls"]
    fewer = {**same, "all": plain - Counter({"cudaMemcpyAsync": 1})}
    assert states(fewer)["all: calls"] == "failed"
    allocates = {**same, "all": plain + Counter({"cudaMalloc": 3})}
    assert [part for part, state in states(allocates).items() if state == "failed"] == [
        "no memory taken from the GPU or given back"
    ]


def fix_of(**changes: Any) -> dict[str, Any]:
    """What `dlprof fix --format json` says of a patch that it kept."""
    measured = {"ratio": 1.5, "low": 1.45, "high": 1.55, "pairs": 3}
    best = {"settings": {"optimizer.fused": True}, "losses": "equal", "measured": measured}
    said = {"best": best, "fix": {"patch": "fix.patch", "words": []}, "attempts": [], "why": "", "state": "found"}
    return {**said, **changes}


@pytest.mark.parametrize(
    ("said", "fixed_ms", "failed"),
    [
        (fix_of(), 20.0, []),
        (fix_of(), 22.5, ["gain of the patched script"]),
        (fix_of(), 17.9, ["gain of the patched script"]),
        (fix_of(best=fix_of()["best"] | {"losses": "differ"}), 20.0, ["losses"]),
        (fix_of(best=fix_of()["best"] | {"settings": {"loader.num_workers": 2}}), 20.0, ["kept"]),
        (fix_of(fix={"patch": None, "words": ["set it"]}), 20.0, ["a patch"]),
        (fix_of(best=None), 20.0, ["kept"]),
    ],
    ids=["right", "less", "more", "losses differ", "another change", "in words", "nothing"],
)
def test_a_patch_must_mend_the_mistake_and_give_what_was_printed(
    said: dict[str, Any], fixed_ms: float, failed: list[str]
) -> None:
    parts = patches.of_fix(said, ("optimizer.fused",), [30.0, 30.0], [fixed_ms])
    assert [part.name for part in parts if part.state == "failed"] == failed


def job_ended(code: int | None, out: str = "", errors: str = "") -> Ended:
    return Ended((), code, 1.0, tuple((0.0, text) for text in out.splitlines()), errors)


def test_a_workload_that_cannot_run_here_is_told_from_one_that_fails() -> None:
    needs = job_ended(1, errors="lightning_cnn.py needs Lightning: pip install 'lightning>=2.4'")
    assert faults.of_failure("x", needs, late=False).state == "skipped"
    usage = job_ended(2, errors="usage: x\nx.py: error: --fault slow_rank needs two ranks: torchrun ...")
    assert faults.of_failure("x", usage, late=False).state == "skipped"
    assert faults.of_failure("x", job_ended(1, errors="RuntimeError: CUDA error"), late=False).state == "failed"
    assert faults.of_failure("x", job_ended(None), late=False).state == "failed"
    assert faults.of_failure("x", job_ended(None), late=True).state == "skipped"
