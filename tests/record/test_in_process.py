"""`with dlprof.record()` records a block of a plain process, which is as it was before once the block has ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dlprof
from dlprof.errors import DlprofError
from dlprof.record.in_process import _exit_of
from tests.fixtures.jobs import TORCHRUN, facts, rows, run_plainly, tiny

pytest.importorskip("torch", reason="recording needs torch")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


TWICE = """
    import torch._dynamo  # as an optimizer does: else the profiler does, and what that adds stays
    import dlprof
    import torch.optim.optimizer as lists

    def state():
        hooks = len(lists._global_optimizer_pre_hooks), len(lists._global_optimizer_post_hooks)
        functions = torch.save, torch.autograd.backward, nn.Module.__call__, DataLoader.__iter__
        return hooks, functions, dict(os.environ), len(os.listdir("/proc/self/fd"))

    loader = DataLoader(data, batch_size=8)
    held = iter(DataLoader(data, batch_size=8))
    train(next(held))
    before = state()
    with dlprof.record(window=(2, 1, 2), sample=0.1, stacks="off") as run:
        assert state() != before
        for batch in loader:
            train(batch)
        train(next(held))
        with dlprof.record("inner") as inner:
            train(next(held))
        while not list(run.path.glob("hosts/*/samples.jsonl")):
            time.sleep(0.05)
    assert state() == before
    print(run.path)
    try:
        with dlprof.record("second", trace=False, sample="off") as second:
            train(next(held))
            raise RuntimeError("of the block")
    except RuntimeError as e:
        print(e)
    assert state() == before
    train(next(held))
    print(run.ranks, "input_wait" in {o.id for o in run.result.outcomes}, second.result.run.exit)
    print(repr(inner), repr(second))
"""


@pytest.mark.long
def test_two_blocks_of_a_process_are_two_runs_and_leave_it_as_it_was(tmp_path: Path) -> None:
    done = run_plainly(tiny(tmp_path, TWICE), "--token", "abc")
    path, raised, opened, shown = done.stdout.splitlines()
    assert Path(path).parent == tmp_path / "runs"
    assert Path(path).name.startswith("train-20")
    assert raised == "of the block"
    assert opened == "(0,) True {'code': 1, 'signal': None}"
    assert "already" in shown
    assert "second', 1 rank" in shown
    assert done.stderr.count("dlprof:") == done.stderr.count(f"recorded already, into {path}") == 1
    assert not (tmp_path / "inner").exists()

    info = json.loads((Path(path) / "run.json").read_text())
    assert info["command"][1:] == [str(tmp_path / "train.py"), "--token", "[redacted]"]
    assert (info["exit"], info["warnings"], info["options"]["window"]) == ({"code": 0, "signal": None}, [], "2,1,2")
    rank = Path(path) / "ranks/00000"
    assert sum(row["optimizer_steps"] for row in rows(rank)) == 10
    assert facts(rank)["window"]["state"] == "exported"
    assert (rank / "trace.json.gz").is_file()

    rank = tmp_path / "second/ranks/00000"
    assert sum(row["optimizer_steps"] for row in rows(rank)) == 1
    assert facts(rank)["window"]["state"] == "off"
    # The iterator was made before both blocks, and says how its loader is set up.
    assert {r["loader"] for r in rows(rank, "loading") if r["kind"] != "usage"} == {0}
    assert [(one["batch_size"], one["num_workers"]) for one in facts(rank)["loaders"]] == [(8, 0)]
    assert json.loads((tmp_path / "second/run.json").read_text())["exit"]["code"] == 1
    assert not list((tmp_path / "second").glob("hosts/*/samples.jsonl"))


BEGUN = """
    import dlprof
    for step, batch in enumerate(DataLoader(data, batch_size=2, num_workers=1)):
        if step == 8:
            block = dlprof.record("run", trace=False, sample="off", stacks="off")
            block.__enter__()
        train(batch)
    for batch in DataLoader(data, batch_size=2, num_workers=1):
        train(batch)
    block.__exit__(None, None, None)
"""


@pytest.mark.long
def test_a_loader_that_is_iterated_already_is_known_by_its_iterator(tmp_path: Path) -> None:
    run_plainly(tiny(tmp_path, BEGUN))
    rank = tmp_path / "run/ranks/00000"
    (loader,) = facts(rank)["loaders"]
    assert (loader["role"], loader["num_workers"], loader["batch_size"]) == ("train", 1, 2)
    assert sum(row["optimizer_steps"] for row in rows(rank)) == 24 + 32


@pytest.mark.long
def test_a_block_that_cannot_be_recorded_runs_and_says_so_once(tmp_path: Path) -> None:
    body = """
        import dlprof
        from dlprof.errors import DlprofError
        open("file", "w").close()
        for path in ("file/run", "idle", "idle"):
            with dlprof.record(path, sample="off") as run:
                if path != "idle":
                    train(next(iter(DataLoader(data))))
            try:
                run.result
            except DlprofError as e:
                print(e)
        os.environ["DLPROF_RUN"] = "elsewhere"
        with dlprof.record("x"):
            print("runs")
    """
    done = run_plainly(tiny(tmp_path, body), TMPDIR=str(tmp_path / "none"))
    first, *more, last = done.stdout.splitlines()
    assert "cannot record into file/run: Not a directory; cannot record into" in first
    assert [line.partition(": ")[2] for line in more] == [
        "no backward() and no optimizer step was seen in the block"
    ] * 2
    assert last == "runs"
    assert "into elsewhere" in done.stderr
    assert done.stderr.count("dlprof:") == len(done.stderr.splitlines()) == 5
    assert "dlprof: idle already holds a run; recording into idle-2\n" in done.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.long
def test_settings_of_a_block_hold_in_it_alone_and_a_forks_child_ends_no_recording(tmp_path: Path) -> None:
    body = """
        import dlprof
        wanted = {"loader.num_workers": 1, "optimizer.foreach": False, "ddp.static_graph": True}
        before = DataLoader(data, batch_size=8)
        with dlprof.record("run", sample=0.1, stacks="off", trace=False, set=wanted) as run:
            made = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(data, batch_size=8)
            for batch in loader:
                train(batch)
            if os.fork() == 0:
                for batch in loader:
                    train(batch)
                sys.exit(3)  # leaves the block
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
            assert "end_ns\\": null" in (run.path / "run.json").read_text()
            for batch in loader:
                train(batch)
        print(loader.num_workers, before.num_workers, made.defaults["foreach"])
        print(DataLoader(data).num_workers, torch.optim.SGD(model.parameters(), lr=0.1).defaults["foreach"])
        print("DLPROF_SET" in os.environ, run.ranks)
    """
    script = tiny(tmp_path, body)
    done = run_plainly(script)
    made, loader = (1 + script.read_text().partition(f"    {name} = ")[0].count("\n") for name in ("made", "loader"))
    assert done.stdout.splitlines() == ["1 0 False", "0 None", "False (0,)"]
    never = "--set ddp.static_graph=True never applied"
    assert sorted(line.removeprefix("dlprof: ") for line in done.stderr.splitlines()) == [
        never,
        f"loader.num_workers 0 → 1 at train.py:{loader}, 1 time",
        f"optimizer.foreach None → False at train.py:{made}, 1 time",
    ]
    info = json.loads((tmp_path / "run/run.json").read_text())
    assert info["options"]["set"] == {"loader.num_workers": 1, "optimizer.foreach": False, "ddp.static_graph": True}
    assert (info["warnings"], info["exit"]["code"]) == ([never], 0)
    applied = rows(tmp_path / "run/ranks/00000", "overrides")[-1]
    assert applied["loader.num_workers"]["places"] == [["train.py", loader, "<module>"]]
    assert sum(row["optimizer_steps"] for row in rows(tmp_path / "run/ranks/00000")) == 16


@pytest.mark.long
def test_lines_are_counted_in_each_block_alone_and_what_compiled_before_is_no_stall(tmp_path: Path) -> None:
    body = """
        import dlprof
        compiled = torch.compile(model, backend=lambda graph, inputs: (time.sleep(0.01), graph.forward)[1])

        def epoch():
            for batch in DataLoader(data, batch_size=8):
                nn.functional.mse_loss(compiled(batch[0]), batch[1]).backward()
                optimizer.step()

        epoch()
        code = epoch.__code__
        with dlprof.record("idle", sample="off", trace=False, lines="__main__:epoch"):
            torch.optim.SGD(model.parameters(), lr=0.1)  # the functions are looked up here
            assert epoch.__code__ is not code
        for path in ("first", "second"):
            with dlprof.record(path, sample="off", trace=False, lines="__main__:epoch"):
                train(data[:8])
                epoch()
            assert epoch.__code__ is code
            epoch()
    """
    assert run_plainly(tiny(tmp_path, body)).stderr.count("dlprof:") == 1  # nothing was recorded of the first
    for path in ("first", "second"):
        rank = tmp_path / path / "ranks/00000"
        assert not [row for row in rows(rank, "stalls") if row["kind"] == "compilation"]
        counted = [hits for row in lines(rank / "lines.jsonl") for _, hits, _ in row["lines"]]
        assert sorted(counted) == [8, 8, 9]


@pytest.mark.long
def test_spawned_workers_and_the_ranks_of_torchrun_are_recorded_into_one_folder(tmp_path: Path) -> None:
    script = tiny(
        tmp_path,
        """
        import dlprof
        import torch.distributed as distributed
        if __name__ == "__main__":
            distributed.init_process_group("gloo")
            with dlprof.record(sample="off") as run:
                for batch in DataLoader(data, batch_size=8, num_workers=1, multiprocessing_context="spawn"):
                    train(batch)
            distributed.barrier()
            print(run.ranks, flush=True)
        """,
    )
    done = run_plainly(*TORCHRUN, script)
    assert done.stdout.replace("\n", "") == "(0, 1)" * 2  # two processes may write into one line
    (folder,) = (tmp_path / "runs").iterdir()
    info = json.loads((folder / "run.json").read_text())
    assert [(task["number"], task["exit"]["code"]) for task in info["tasks"]] == [("0", 0), ("1", 0)]
    for rank in ("00000", "00001"):
        assert len({row["pid"] for row in lines(folder / "ranks" / rank / "fetches.jsonl")}) == 1


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"window": (1, 2, 0)}, ValueError, "window"),
        ({"window": (1, 2)}, ValueError, "window"),
        ({"flops": "maybe"}, ValueError, "flops"),
        ({"lines": "function"}, ValueError, "lines"),
        ({"stacks": 0}, ValueError, "stacks"),
        ({"sample": "never"}, ValueError, "sample"),
        ({"windows": (1, 2, 3)}, TypeError, "windows"),
        ({"set": 4}, TypeError, ""),
        ({"set": {"torch.autocast": "bf16"}}, ValueError, "allow_numerics=True"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_the_block(wrong: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        dlprof.record(**wrong)


def test_before_its_end_a_block_is_no_run() -> None:
    block: Any = dlprof.record("somewhere", set={"torch.autocast": "bf16"}, allow_numerics=True)
    with pytest.raises(DlprofError, match="has not ended"):
        _ = block.result
    assert block._repr_html_() is None
    assert not Path("somewhere").exists()


@pytest.mark.parametrize(
    ("error", "code", "signal"),
    [
        (None, 0, None),
        (SystemExit(), 0, None),
        (SystemExit(0), 0, None),
        (SystemExit(3), 3, None),
        (SystemExit("no"), 1, None),
        (RuntimeError(), 1, None),
        (KeyboardInterrupt(), None, 2),
    ],
)
def test_a_block_ends_as_the_command_would(error: BaseException | None, code: int | None, signal: int | None) -> None:
    assert _exit_of(error) == {"code": code, "signal": signal}
