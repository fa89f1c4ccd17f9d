"""`dlprof scale` on runs that exist, on a script that it records itself, and what it says of mistakes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from dlprof.cli import cli
from tests.fixtures import jobs
from tests.fixtures.jobs import environment, running, tiny

RANKS = """
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model) if dist.get_world_size() > 1 else model
for epoch in range(10_000):
    for batch in DataLoader(data, batch_size=int(sys.argv[1])):
        train(batch)
        time.sleep(0.02)
"""


def scale(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["scale", *map(str, words)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "name two runs or more"),
        (("one",), 2, "name two runs or more"),
        (("--procs", "1,x", "w"), 2, "names no numbers of ranks"),
        (("--procs", "0", "w"), 2, "names no numbers of ranks"),
        (("--procs", "2,1,2", "w"), 2, "names 2 twice"),
        (("--procs", "1,2", "--gpus", "1", "w"), 2, "exclude each other"),
        (("--procs", "1,2", "a", "b"), 2, "name no runs"),
        (("--procs", "1,2", "--", "train.py"), 2, "write {ranks}"),
        (("--procs", "1,2", "--mode", "strong", "--batch", "8", "--", "torchrun", "{ranks}"), 2, "write {batch}"),
        (("--procs", "1,3", "--mode", "strong", "--batch", "8", "--", "x", "{ranks}", "{batch}"), 1, "not a multiple"),
        (("--procs", "1,2", "--mode", "strong", "ddp_resnet"), 2, "--batch"),
        (("--procs", "1,2", "nothing_like_it"), 2, "no workload nothing_like_it"),
        (("--", "train.py"), 2, "name the numbers of ranks"),
        (("none/a", "none/b"), 1, "none of these runs has a size"),
    ],
)
def test_mistakes(words: tuple[str, ...], code: int, said: str) -> None:
    ended, output = scale(*words)
    assert (ended, said in output) == (code, True)


# A sweep of a script runs in any check, and a study of runs that exist: test_sweep.py, tests/test_docs_run.py.
@pytest.mark.slow
def test_a_script_on_one_and_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    script = tiny(tmp_path, RANKS)
    command = [*jobs.DLPROF, "scale", "--procs", "1,2", "--repeat", "1", "--batch", "2", "-o", "study", "--"]
    python, starts, _, *words = jobs.as_ranks(script, "{batch}")
    done = subprocess.run(
        [*command, python, starts, "{ranks}", *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "study" / "scale.json").read_bytes())
    assert [s["ranks"] for s in data["sizes"]] == [1, 2]
    assert data["mode"] == "weak"
    assert data["left_out"] == []
    one, two = data["sizes"]
    assert (one["samples"], two["samples"]) == (2, 4)
    assert two["speedup"] == pytest.approx(2 * one["step_ns"] / two["step_ns"])
    assert running(script) == []
