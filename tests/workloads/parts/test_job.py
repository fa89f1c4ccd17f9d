"""What the command line leaves open comes from the device, and a line says how fast the steps since the last were."""

from __future__ import annotations

import argparse
import re

import pytest
import torch
import torch.distributed as dist
from parts import job
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DEFAULTS = {"cpu": {"width": 1}, "cuda": {"width": 9}}


def read(*argv: str) -> argparse.Namespace:
    parser = job.options("Train a model.\n\nMore.", {"late": "straggler"})
    parser.add_argument("--width", type=int)
    parser.add_argument("--log-every", type=int, default=2)
    return job.read(parser, list(argv), DEFAULTS, needs_two_ranks=["late"])


def test_the_command_line_goes_before_the_defaults_of_the_device() -> None:
    assert [read("--device", device).width for device in ("cpu", "cuda")] == [1, 9]
    assert read("--device", "cuda", "--width", "3").width == 3


def test_the_launcher_says_which_rank_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    alone = read("--device", "cuda")
    assert (alone.rank, alone.world, alone.local_rank, alone.device_ids) == (0, 1, 0, [0])
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    one = read("--device", "cpu", "--fault", "late")
    assert (one.rank, one.world, one.local_rank, one.device_ids) == (5, 8, 1, None)
    assert read("--device", "cuda").device_ids == [1]


def test_a_line_every_so_many_steps_on_the_first_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, 12.0, 13.0, 0.0])
    monkeypatch.setattr("parts.job.time.perf_counter", lambda: next(clock))
    log = job.Log(argparse.Namespace(rank=0, log_every=2), "pictures", each_step=1000)
    for step in range(1, 6):
        log.step(step, torch.tensor(1 / step))
    job.Log(argparse.Namespace(rank=1, log_every=2), "pictures", 1000).step(2, torch.tensor(1.0))
    assert capsys.readouterr().out.splitlines() == [
        "step 2  loss 0.5000  1,000 pictures/s",
        "step 4  loss 0.2500  2,000 pictures/s",
    ]


def test_the_planted_fault_is_announced_by_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        for fault in (None, "late"):
            job.announce(argparse.Namespace(rank=rank, fault=fault), f"rank {rank}")
    assert capsys.readouterr().out == "rank 0, fault: none\nrank 0, fault: late\n"


def test_every_epoch_has_an_order_of_its_own_which_comes_again() -> None:
    def orders() -> list[list[int]]:
        pictures = TensorDataset(torch.arange(32))
        loader = DataLoader(pictures, 32, sampler=DistributedSampler(pictures, 1, 0, seed=3))
        return [batch.tolist() for (batch,) in job.batches(loader, 2)]

    first, second = orders()
    assert first != second
    assert sorted(first) == sorted(second) == list(range(32))
    assert orders() == [first, second]


def test_one_process_is_a_group_if_asked_for_and_else_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    alone = argparse.Namespace(device="cpu", rank=0, world=1, local_rank=0)
    with job.ranks(alone):
        assert not dist.is_initialized()
    with job.process_group(alone):
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_products_are_in_the_precision_that_was_asked_for(precision: str, dtype: torch.dtype) -> None:
    context, x = job.autocast(argparse.Namespace(device="cpu", precision=precision)), torch.ones(2, 2)
    for _ in range(2):
        with context:
            assert (x @ x).dtype == dtype
        assert (x @ x).dtype == torch.float32


def test_help_names_every_fault_and_its_rule(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--help")
    text = capsys.readouterr().out
    assert "Train a model.\n" in text
    assert "More" not in text
    assert re.search(r"^ *late .*straggler$", text, re.MULTILINE)
