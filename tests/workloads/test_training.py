"""Every workload learns, alike whatever is planted in it, and refuses in words what it cannot do."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from tests.workloads.scripts import TINY, load, losses, refusal, train

LIBRARIES = {"deepspeed_gpt": "deepspeed", "lightning_cnn": "lightning"}


def found(name: str, options: str, ranks: int = 2) -> list[float]:
    """Return the losses that a workload prints on CPU ranks; skip where its library is not installed."""
    if (library := LIBRARIES.get(name)) and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    return losses(train(name, *TINY[name], *options.split(), ranks=ranks, limit_s=850))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options", "other", "ratio"),
    [
        ("amp_transformer", "--steps=60", "--fault=loop_optimizer", 0.75),
        ("bert_pretrain", "--steps=100", "--fault=loop_optimizer", 0.9),
        ("model_parallel", "--steps=40 --microbatches=1", "--microbatches=4", 1.0),
    ],
)
def test_one_process_learns_and_what_costs_time_changes_nothing(
    name: str,
    options: str,
    other: str,
    ratio: float,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other where other tests have the cores
    printed = []
    for more in (options, f"{options} {other}"):
        monkeypatch.setattr(sys, "argv", [name, *TINY[name], *more.split()])
        load(name).main()
        lines = capsys.readouterr().out.splitlines()
        printed.append([float(line.partition("loss ")[2].split()[0]) for line in lines if "loss " in line])
    torch.set_num_threads(threads)
    healthy, changed = printed
    assert healthy[-1] < ratio * healthy[0]
    assert changed == pytest.approx(healthy, rel=1e-2)


slow = pytest.mark.slow


@pytest.mark.long
@pytest.mark.timeout(900)  # DeepSpeed compiles an operator on its first run
@pytest.mark.parametrize(
    ("name", "options", "ranks", "ratio"),
    [
        pytest.param("dlrm_like", "--steps=60", 2, 0.9, marks=slow),
        pytest.param("fsdp_gpt", "--steps=40 --prefetch=1 --checkpointing", 2, 0.9, marks=slow),
        pytest.param("moe_transformer", "--steps=40 --precision=bf16", 2, 0.9, marks=slow),
        pytest.param("pipeline_transformer", "--steps=60", 2, 0.7, marks=slow),
        pytest.param("tensor_parallel_gpt", "--steps=40", 2, 0.9, marks=slow),
        pytest.param("amp_transformer", "--steps=20 --precision=bf16 --compile=eager", 2, 1.0, marks=slow),
        pytest.param("bert_pretrain", "--steps=100 --optimizer=lamb --lr=0.02", 1, 0.99, marks=slow),
        *(pytest.param("data_parallel", "--steps=40", ranks, 0.8, marks=slow) for ranks in (1, 2)),
        *(
            pytest.param("deepspeed_gpt", f"--steps=40 --stage={stage}", 2, 0.9, marks=slow)
            for stage in ("1", "2", "3", "2 --offload")
        ),
        *(pytest.param("lightning_cnn", "--steps=40", ranks, 0.8, marks=slow) for ranks in (1, 2)),
        *(
            pytest.param("moe_transformer", f"--steps=40 {option}", 2, 0.9, marks=slow)
            for option in ("--experts=4", "--fault=imbalance", "--fault=loop_optimizer")
        ),
        pytest.param("pipeline_transformer", "--steps=40 --replicas=2", 4, 1.0, marks=slow),
        pytest.param("fsdp_gpt", "--steps=20", 1, 1.0, marks=slow),
        pytest.param("tensor_parallel_gpt", "--steps=20 --tensor-parallel=2", 4, 1.0, marks=slow),
        *(
            pytest.param("pipeline_transformer", f"--steps=20 {option}", 2, 1.0, marks=slow)
            for option in ("--schedule=GPipe --split=3,1", "--schedule=Interleaved1F1B", "--schedule=ZBV")
            if option.split("=")[1].split()[0] in load("pipeline_transformer").SCHEDULES
        ),
    ],
)
def test_ranks_learn(name: str, options: str, ranks: int, ratio: float) -> None:
    printed = found(name, options, ranks)
    assert len(printed) == int(options.split()[0].partition("=")[2]) // 10
    assert printed[-1] < ratio * printed[0]


@slow
@pytest.mark.parametrize(
    ("name", "options", "others", "ranks", "rel"),
    [
        ("bert_pretrain", "--steps=40", ("--fault=sync_every_batch",), 2, 1e-2),
        ("dlrm_like", "--steps=20", ("--fault=python_ids",), 1, 1e-9),
        (
            *("fsdp_gpt", "--steps=10"),
            ("--no-reshard", "--sharding=zero1", "--sharding=ddp", "--fault=each_layer", "--fault=loop_optimizer"),
            *(2, 2e-2),
        ),
        ("pipeline_transformer", "--steps=10", ("--fault=few_microbatches",), 2, 1e-3),
        (
            *("tensor_parallel_gpt", "--steps=20"),
            ("--fault=column_only", "--fault=loop_optimizer", "--no-sequence-parallel", "--precision=bf16"),
            *(2, 1e-2),
        ),
    ],
)
def test_other_ways_to_train_learn_the_same(
    name: str, options: str, others: tuple[str, ...], ranks: int, rel: float
) -> None:
    plain = found(name, options, ranks)
    for other in others:
        assert found(name, f"{options} {other}", ranks) == pytest.approx(plain, rel=rel), other


@pytest.mark.parametrize(
    ("name", "options", "ranks", "said"),
    [
        ("amp_transformer", "--fault=full_precision", 1, "needs a GPU"),
        ("amp_transformer", "--fault=data_parallel", 1, "needs two GPUs"),
        ("amp_transformer", "--precision=tf32", 1, "needs a GPU"),
        ("amp_transformer", "--heads=5", 1, "cannot be shared out among 5 heads"),
        ("amp_transformer", "--vocabulary=100", 1, "less than the bytes"),
        ("bert_pretrain", "--fault=boolean_mask", 1, "needs a GPU"),
        ("bert_pretrain", "--fault=sync_every_batch", 1, "needs two ranks"),
        ("bert_pretrain", "--vocabulary=200", 1, "too few for the words of 20 topics"),
        ("bert_pretrain", "--accumulate=0", 1, "one batch at least"),
        ("data_parallel", "--fault=data_parallel", 1, "needs two GPUs"),
        ("ddp_resnet", "--fault=slow_rank", 1, "needs two ranks"),
        ("ddp_resnet", "--fault=pageable", 1, "needs a GPU"),
        ("deepspeed_gpt", "--fault=offload", 2, "needs a GPU"),
        ("deepspeed_gpt", "--fault=long_sequences", 1, "needs two ranks"),
        ("dlrm_like", "--fault=host_tables", 2, "needs a GPU"),
        ("dlrm_like", "--fault=uneven_tables", 1, "needs two ranks"),
        ("dlrm_like", "--tables=2", 4, "cannot be shared out among 4 ranks"),
        ("fsdp_gpt", "--fault=no_p2p", 2, "needs a GPU"),
        ("fsdp_gpt", "--fault=long_sequences", 1, "needs two ranks"),
        ("fsdp_gpt", "--fault=each_layer --sharding=zero1", 2, "needs --sharding fsdp"),
        ("loader_variants", "--fault=pageable", 1, "needs a GPU"),
        ("model_parallel", "--fault whole_batch", 1, "needs a GPU"),
        ("model_parallel", "--devices=2", 1, "no more than 1"),
        ("model_parallel", "--microbatches=5", 1, "cannot be cut into 5"),
        ("moe_transformer", "--fault=imbalance", 1, "needs two ranks"),
        ("moe_transformer", "--experts=5", 2, "cannot be shared out among 2 ranks"),
        ("moe_transformer", "--top=9", 2, "must be from 1"),
        ("pipeline_transformer", "", 1, "a pipeline needs two ranks"),
        ("pipeline_transformer", "--microbatches=5", 2, "cannot be cut into 5"),
        ("pipeline_transformer", "--layers=4 --split=3,2", 2, "2 stages of 4 layers"),
        ("pipeline_transformer", "--replicas=2", 2, "for each of 2 pipelines"),
        ("tensor_parallel_gpt", "", 1, "needs two ranks"),
        ("tensor_parallel_gpt", "--fault=read_every_step", 2, "needs a GPU"),
        ("tensor_parallel_gpt", "--tensor-parallel=3", 4, "does not divide 4 ranks"),
        ("tensor_parallel_gpt", "--width=30", 2, "cannot be shared out among 16 heads"),
    ],
)
def test_what_cannot_be_is_a_usage_error(
    name: str,
    options: str,
    ranks: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert said in refusal(load(name), ("--device=cpu", *options.split()), capsys)


@pytest.mark.parametrize(
    ("name", "library", "said"),
    [
        ("horovod_resnet", "horovod", "horovod_resnet.py needs Horovod"),
        ("lightning_cnn", "lightning", "lightning_cnn.py needs Lightning: pip install 'lightning>=2.4'"),
        ("deepspeed_gpt", "deepspeed", "deepspeed_gpt.py needs DeepSpeed: pip install"),
    ],
)
def test_without_its_library_a_workload_says_what_it_needs(
    name: str, library: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match=said) as stopped:
        load(name).main()
    assert "\n" not in str(stopped.value)
    sys.modules.pop(name, None)
