"""What comes home from a GPU names no machine and nobody, is small, and unpacks to what was recorded."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import fixtures, jobs

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
    (rank / "steps.jsonl").write_text('{"step":0,"kind":"train","dur_ns":5}\n')
    (rank / "gpu.jsonl").write_text('{"at_ns":1,"power_w":612.5}\n')
    (rank / "stacks.txt.gz").write_bytes(gzip.compress(f"main ({at}/train.py:3) 7\n".encode()))
    trace = {"host_name": host, "traceEvents": [{"ts": 1795419847990977.339, "name": f"open {at}/data"}]}
    (rank / "trace.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    (here / "host.jsonl").write_text('{"at_ns":1,"cpu":0.5}\n')
    (here / "hello.jsonl").write_text('{"pid": 1}\n')
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
        "hosts/host/host.jsonl",
        "oracle.json",
        f"{rank}/facts.json",
        f"{rank}/gpu.jsonl",
        f"{rank}/stacks.txt.gz",
        f"{rank}/steps.jsonl",
        f"{rank}/trace.json.gz",
        "run.json",
    }
    # A line that the stacks stand at is found again.
    assert found[f"{rank}/stacks.txt.gz"] == "main (here/train.py:3) 7\n"
    # Figures are as they were; what must agree with each other still does.
    assert json.loads(found[f"{rank}/gpu.jsonl"])["power_w"] == 612.5
    facts, told = json.loads(found[f"{rank}/facts.json"]), json.loads(found["oracle.json"])
    assert facts["env"] == {"PYTORCH_ALLOC_CONF": "x:1"}
    assert facts["device"]["uuid"] == told["uuid"]
    assert told["step_ms"] == 40.25
    assert told["machine"]["gpus"] == ["NVIDIA H200"]
    assert json.loads(found["run.json"])["hosts"] == ["host"]


def test_a_trace_is_copied_as_text_so_that_no_time_is_rounded(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "work")
    exact = '{"host_name": "node-17.cluster.example", "traceEvents": [{"ts": 1795419847990977.339}]}'
    (run / "ranks/00000/trace.json.gz").write_bytes(gzip.compress(exact.encode()))
    fixtures.keep(run, tmp_path / "kept", {"judge": "counted"}, MACHINE)
    assert texts(tmp_path / "kept")["ranks/00000/trace.json.gz"] == exact.replace("node-17.cluster.example", "host")


def test_a_hosts_short_name_is_replaced_where_a_host_is_told_and_nowhere_else(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "work", host="vm")
    steps = run / "ranks/00000/steps.jsonl"
    steps.write_text('{"step":0,"kind":"vm"}\n')
    fixtures.keep(run, tmp_path / "kept", {"judge": "counted"}, MACHINE)
    found = texts(tmp_path / "kept")
    assert found["ranks/00000/steps.jsonl"] == '{"step":0,"kind":"vm"}\n'
    assert json.loads(found["ranks/00000/facts.json"])["host"] == "host"
    assert '"host_name": "host"' in found["ranks/00000/trace.json.gz"]


def test_what_still_names_something_is_told_and_the_recording_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_folder(tmp_path / "work")
    monkeypatch.setattr(fixtures, "scrub", lambda _name, text, _known: text)
    with pytest.raises(ValueError, match="it still names") as failed:
        fixtures.keep(run, tmp_path / "kept", {"judge": "counted"}, MACHINE)
    assert "node-17" not in str(failed.value)
    assert not (tmp_path / "kept").exists()


def test_a_trace_that_is_too_large_is_not_kept(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "work")
    (run / "ranks/00000/trace.json.gz").write_bytes(gzip.compress(os.urandom(fixtures.MOST_TRACE_BYTES + 1)))
    with pytest.raises(ValueError, match="its trace has"):
        fixtures.keep(run, tmp_path / "kept", {"judge": "counted"}, MACHINE)


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
