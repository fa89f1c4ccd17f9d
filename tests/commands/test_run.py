"""`dlprof run`: which script, on how many ranks of which kind, under which environment."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from dlprof.cli import cli
from dlprof.commands.run import constant, count_gpus
from tests.fixtures.jobs import DLPROF, environment, launch

WORKLOAD = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
with open(f"told-{os.environ['RANK']}", "w") as file:
    json.dump([sys.argv[1:], [os.environ.get(name) for name in names]], file)
"""


def test_two_cpu_ranks_with_a_fault_and_arguments(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    (tmp_path / "workloads").mkdir()
    (tmp_path / "workloads/tells.py").write_text('SHOWN_WITH = {"slow_loader": "--width 8"}\n' + WORKLOAD)
    # The workload's own options stand anywhere after its name; after -- they may have the names of ours.
    own, ours = ["--steps", "3", "--compile"], ["--procs", "2", "--fault", "slow_loader", "-o", "run"]
    command = [*DLPROF, "run", "tells", *own, *ours, "--data=x", "--", "--window", "5"]
    done = launch(command, tmp_path, env=environment(OMP_NUM_THREADS="7"))
    assert done.returncode == 0, done.stderr
    assert "tells.py --width 8 --steps 3 --compile --data=x --window 5 on 2 CPU ranks" in done.stderr
    for rank in ("0", "1"):
        told = json.loads((tmp_path / f"told-{rank}").read_text())
        arguments = ["--fault", "slow_loader", "--width", "8", *own, "--data=x", "--window", "5"]
        assert told == [arguments, [rank, "2", "", "7"]]
    options = json.loads((tmp_path / "run/run.json").read_text())["options"]
    assert options["fault"] == "slow_loader"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["none"], "no workload none; there are: amp_transformer, "),
        (["tells.py", "--gpus", "99"], "--gpus 99: there"),
        (["ddp_resnet", "--fault", "none"], "ddp_resnet has no fault none; there are: blocking_allreduce, "),
        (["ddp_resnet", "--procs", "1", "--fault", "pageable"], "ddp_resnet --fault pageable needs a GPU"),
        (["ddp_resnet", "--procs", "1", "--fault", "slow_rank"], "ddp_resnet --fault slow_rank needs two ranks"),
        (["ddp_resnet", "--procs", "1", "--stepz", "5"], "ddp_resnet: unrecognized arguments: --stepz 5 ("),
        (["dlrm_like", "--procs", "4", "--tables", "2"], "dlrm_like: --tables 2 cannot be shared out among 4 ranks ("),
        (["tells.py", "--procs", "1"], "tells needs nowhere_at_all: pip install it"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(
    given: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tells.py").write_text('NEEDS = {"json": "", "nowhere_at_all": "pip install it"}\n' + WORKLOAD)
    done = CliRunner().invoke(cli, ["run", *given])
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tells.py"]


def test_the_list_tells_of_every_workload_and_of_every_fault_its_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "workloads").mkdir()
    (tmp_path / "workloads/mine.py").write_text('"""Train mine, well, or not."""\nFAULTS = {"late": "input_wait"}\n')
    done = CliRunner().invoke(cli, ["run", "--list"])
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "mine: Train mine" in lines
    assert "ddp_resnet: Train a ResNet, VGG-19 or AlexNet on pictures with DistributedDataParallel" in lines
    listed = [line.split() for line in lines if line.startswith("    ")]
    assert ["late", "input_wait"] in listed
    known = (Path(__file__).resolve().parents[2] / "workloads").glob("*.py")
    assert all(
        [fault, rule] in listed for script in known for fault, rule in (constant(script, "FAULTS") or {}).items()
    )


@pytest.mark.long
@pytest.mark.parametrize("installed", [True, False])
def test_a_workload_may_name_the_launcher_of_its_ranks(tmp_path: Path, installed: bool) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    # nice starts one process, and what would be the number of ranks is how nice it is.
    name = "nice" if installed else "no-such-launcher"
    # In one piece: torchrun has Python write whatever it is told to print at once, and two ranks then mix their words.
    told = "import os\nos.write(1, f'nice {os.nice(0)} rank {os.environ.get(\"RANK\")}\\n'.encode())\n"
    (tmp_path / "own.py").write_text(f"LAUNCHER = ({name!r}, '-n')\n{told}")
    done = launch([*DLPROF, "run", "own.py", "--procs", "2"], tmp_path)
    assert done.returncode == 0, done.stderr
    usual = os.nice(0)
    both = [f"nice {usual} rank 0", f"nice {usual} rank 1"]
    assert sorted(done.stdout.splitlines()) == ([f"nice {usual + 2} rank None"] if installed else both)


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 3), ("", 0), ("-1", 0), ("0", 1), ("2,0", 2), ("0,7,1", 1), ("GPU-bb", 1), ("GPU-bb,GPU-zz", 1)],
)
def test_gpus_are_counted_as_the_job_would_see_them(
    visible: str | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = tmp_path / "nvidia-smi"
    names = {"GPU 0": "GPU-aa", "GPU 1": "GPU-bb", "GPU 2": "GPU-cc"}
    lines = "\n".join(f"{name}: NVIDIA H200 (UUID: {uuid})" for name, uuid in names.items())
    lists.write_text(f"#!/bin/sh\ncat <<END\n{lines}\nEND\n")
    lists.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count
