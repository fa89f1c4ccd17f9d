"""Where the ranks of a launcher's job meet, and what rank 0 makes of who they are."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch", reason="exchanging needs torch")
from dlprof.errors import DlprofError
from dlprof.trial.bandwidth import joining
from dlprof.trial.bandwidth.joining import BrokenError, Ranks, first_host, first_line, place
from dlprof.trial.bandwidth.watching import Watch
from tests.fixtures import worlds


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("a,b", "a"),
        ("node[003-006,9],login1", "node003"),
        ("node[12,14]", "node12"),
        ("rack[1-2]n[3-4],x", "rack1n3"),
    ],
)
def test_the_first_host_of_slurms_lists(nodes: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # without scontrol
    assert first_host(nodes) == first


def test_launchers_say_where_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert place({"MASTER_ADDR": "here", "MASTER_PORT": "1234", "SLURM_STEP_ID": "0"}) == ("here", 1234)
    step = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "n[4-7]"}
    host, port = place(step)
    assert (host, place(step)[1]) == ("n4", port)
    assert place({**step, "SLURM_STEP_ID": "4"})[1] != port
    assert 20_000 <= port < 28_000
    assert place({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})[0] == "127.0.0.1"
    assert place({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"})[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "environ", [{}, {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, {"SLURM_JOB_NODELIST": "n1"}]
)
def test_where_nobody_says_it_that_is_one_line(environ: dict[str, str]) -> None:
    with pytest.raises(DlprofError, match="MASTER_ADDR is not set"):
        place(environ)


def test_the_first_line_of_torchs_errors() -> None:
    text = (
        "\n[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711\nmore"
    )
    assert first_line(RuntimeError(text)) == "Connection closed by peer [127.0.0.1]:4711"
    assert first_line(RuntimeError()) == "RuntimeError"


def who(*of: tuple[str, str]) -> list[Any]:
    return [{"host": f"n{r}", "device": "", "backend": backend, "why": why} for r, (backend, why) in enumerate(of)]


def test_all_ranks_take_one_backend_or_none_does() -> None:
    assert joining._agreed(who(("nccl", ""), ("nccl", ""))) == ("nccl", "")
    assert joining._agreed(who(("nccl", ""), ("gloo", ""))) == ("gloo", "")
    backend, why = joining._agreed(who(("nccl", ""), ("nccl", "there is no GPU for nccl")))
    assert (backend, why) == ("", "rank 1 on n1 cannot take part: there is no GPU for nccl")


def test_machines_of_one_name_are_two_hosts() -> None:
    who = [{"host": host, "boot": boot} for host, boot in (("n", "1" * 9), ("n", "2" * 9), ("m", "3"), ("n", "1" * 9))]
    assert joining.hosts_of(who) == ["n", "n~22222222", "m", "n"]


def test_ranks_collect_and_announce() -> None:
    store = worlds.store()
    with Watch(60) as watch:
        first, second = (Ranks(r, 2, store, watch) for r in range(2))
        other = threading.Thread(target=lambda: second.collect("who", "b"))
        other.start()
        assert first.collect("who", "a") == ["a", "b"]
        other.join()
        assert first.announce("go", [1, 2.5]) == [1, 2.5]
        assert second.announce("go") == [1, 2.5]


def test_a_rank_that_never_comes_is_named() -> None:
    store = worlds.store()
    store.set_timeout(timedelta(milliseconds=50))
    with Watch(60) as watch, pytest.raises(BrokenError, match="rank 1 has not come as far"):
        Ranks(0, 2, store, watch).collect("who", "a")
