"""A real script runs with the settings of --set, and leaves what each did in the rank's folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dlprof.record.collectors.overrides import Overrides
from tests.fixtures.in_process import run_recorded
from tests.fixtures.jobs import environment, facts, free_port, launch, record, tiny, wrapped
from tests.fixtures.overriding import left, sets

pytest.importorskip("torch", reason="recording needs torch")

# As little as can be recorded.
SMALL = ("--no-trace", "--no-sample")

LOOP = """
import json
loader = DataLoader(data, batch_size=8, num_workers=int(sys.argv[1]) if len(sys.argv) > 1 else 0)
validation = DataLoader(data, batch_size=8)
for batch in loader:
    train(batch)
for x, y in validation:
    model(x)
print(json.dumps({
    "workers": [loader.num_workers, validation.num_workers], "threads": torch.get_num_threads(),
    "fused": optimizer.param_groups[0]["fused"], "variable": os.environ.get("OMP_WAIT_POLICY"),
}) + "\\n", end="")  # in one write: torchrun's ranks are not buffered
"""


@pytest.mark.long
def test_a_recorded_script_has_the_settings_and_what_each_did_is_written_and_said(tmp_path: Path) -> None:
    script = tiny(tmp_path, LOOP + "sys.exit(5)\n")
    sets_it = "import os\nos.environ.update({'OMP_WAIT_POLICY': 'ACTIVE', 'OTHER': '1'})\n"
    script.write_text(sets_it + script.read_text())
    settings: dict[str, Any] = {"loader.num_workers": 1, "torch.num_threads": 2, "env.OMP_WAIT_POLICY": "PASSIVE"}
    settings |= {"optimizer.fused": True, "copy.non_blocking": True}
    options = (*SMALL, *sets(*(f"{name}={value}" for name, value in settings.items())))
    done = launch(wrapped(tmp_path / "run", [sys.executable, script], *options), tmp_path)
    assert done.returncode == 5  # the script's
    expected = {"workers": [1, 1], "threads": 2, "fused": True, "variable": "PASSIVE"}
    assert json.loads(done.stdout) == expected
    effects = left(tmp_path / "run")
    lines = script.read_text().splitlines()

    def at(*texts: str) -> list[list[Any]]:
        numbers = (next(n for n, line in enumerate(lines, 1) if line.startswith(text)) for text in texts)
        return [["train.py", number, "<module>"] for number in numbers]

    where = at("loader =", "validation =")
    assert effects["loader.num_workers"] == {"value": 1, "applied": 2, "before": [0], "places": where, "error": None}
    assert effects["optimizer.fused"]["places"] == at("optimizer =")
    threads = {"applied": 2, "before": [1], "error": None, "places": at("import torch", "torch.set")}
    assert effects["torch.num_threads"] == {"value": 2, **threads}
    variable = effects["env.OMP_WAIT_POLICY"]
    assert (variable["before"], variable["places"]) == (["ACTIVE"], [["train.py", 2, "<module>"]])
    assert effects["copy.non_blocking"]["applied"] == 0
    told = json.loads((tmp_path / "run/run.json").read_text())
    assert told["options"]["set"] == settings
    assert told["warnings"] == ["--set copy.non_blocking=True never applied"]
    assert [line for line in done.stderr.splitlines() if "--set" in line] == [f"dlprof: {told['warnings'][0]}"]
    changed = f"loader.num_workers 0 → 1 at train.py:{where[0][1]}, train.py:{where[1][1]}, 2 times"
    assert f"dlprof: {changed}\n" in done.stderr
    assert facts(tmp_path / "run/ranks/00000")["loaders"][0]["num_workers"] == 1


@pytest.mark.slow
def test_torchrun_and_a_launcher_that_sets_the_variable_itself(tmp_path: Path) -> None:
    script = tiny(tmp_path, LOOP)
    launcher = tmp_path / "launcher.sh"
    launcher.write_text('#!/bin/sh\nexport OMP_WAIT_POLICY=ACTIVE\nexec "$@"\n')
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    options = (*SMALL, *sets("loader.num_workers=0", "env.OMP_WAIT_POLICY=PASSIVE", "gc.freeze=on"))
    command: list[str | Path] = ["sh", launcher, *torchrun, script, "1"]
    done = launch(wrapped(tmp_path / "run", command, *options), tmp_path, env=environment(OMP_WAIT_POLICY="ACTIVE"))
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(one["workers"], one["variable"]) for one in said] == [([0, 0], "PASSIVE")] * 2
    for rank in range(2):
        effects = left(tmp_path / "run", rank)
        assert effects["loader.num_workers"]["before"] == [1]
        assert effects["env.OMP_WAIT_POLICY"]["before"] == ["ACTIVE"]
        assert effects["gc.freeze"]["applied"] == 1
    assert "--set" not in done.stderr


@pytest.mark.long
def test_loaders_whose_workers_are_spawned_keep_the_overrides_out_of_the_workers(tmp_path: Path) -> None:
    body = """
    import json
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 16
        def __getitem__(self, n):
            return torch.ones(8), torch.tensor([float(torch.get_num_threads())])
    if __name__ == "__main__":
        loader = DataLoader(Rows(), batch_size=8, multiprocessing_context="spawn", num_workers=1)
        for batch in loader:
            train(batch)
        print(json.dumps([loader.num_workers, batch[1].flatten().tolist()]))
    """
    script = tiny(tmp_path, body)
    done = record(
        script, folder=tmp_path / "run", options=(*SMALL, *sets("torch.num_threads=2", "loader.num_workers=2"))
    )
    assert json.loads(done.stdout) == [2, [1.0] * 8]
    assert os.listdir(tmp_path / "run/ranks") == ["00000"]  # noqa: PTH208 - names


def test_a_child_that_was_forked_writes_nothing_into_the_ranks_file(tmp_path: Path) -> None:
    body = """
import os, torch
from torch.utils.data import DataLoader
data, model = torch.ones(64, 8), torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n in range(3):
    model(next(iter(DataLoader(data, batch_size=8)))).sum().backward()
    optimizer.step()
pid = os.fork()
if pid == 0:
    for n in range(50):
        DataLoader(data)
    os._exit(0)
os.waitpid(pid, 0)
"""
    run_recorded(tmp_path, body, set={"loader.num_workers": 0})
    assert left(tmp_path / "run")["loader.num_workers"]["applied"] == 3


def test_settings_that_are_no_json_switch_the_overrides_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLPROF_SET", "{")
    with pytest.raises(ValueError, match="Expecting"):
        Overrides()


def test_a_part_that_this_torch_has_not_costs_its_overrides_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dlprof.record import hooks
    from dlprof.record.overrides import constructors

    def broken(*_: object) -> None:
        raise AttributeError("another torch")

    monkeypatch.setattr(constructors, "install_loaders", broken)
    monkeypatch.setenv(
        "DLPROF_SET", json.dumps({"set": {"loader.num_workers": 1, "gc.freeze": True}, "environment": {}})
    )
    try:
        made = Overrides()

        kept = list[str]()

        class Recorder:
            keep = staticmethod(lambda _, text: kept.append(text))

        made.start(Recorder())  # type: ignore[arg-type]
        made.stop()
    finally:
        hooks.uninstall()
    written = json.loads(kept[-1])
    assert written["loader.num_workers"]["error"] == "AttributeError: another torch"
    assert (written["gc.freeze"]["applied"], written["gc.freeze"]["error"]) == (1, None)
