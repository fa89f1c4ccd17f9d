"""What the workloads share: their command line, layers and losses by hand, optimizers, networks, exchanges."""

from __future__ import annotations

import argparse

import pytest
import torch
from parts import by_hand, job
from parts.exchanges import to_owners
from parts.networks import build_model
from parts.optimizers import Lamb, Lars
from torch import distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)


def test_a_norm() -> None:
    x = torch.randn(4, 8, 16)
    torch.testing.assert_close(by_hand.LayerNorm(16)(x), nn.LayerNorm(16)(x))


def test_an_embedding() -> None:
    made, own = by_hand.OneHot(10, 4), nn.Embedding(10, 4)
    made.weight.data = own.weight.data
    tokens = torch.randint(0, 10, (3, 5))
    torch.testing.assert_close(made(tokens), own(tokens))


def test_a_loss() -> None:
    logits, targets = torch.randn(6, 9), torch.arange(6)
    torch.testing.assert_close(by_hand.cross_entropy(logits, targets), nn.functional.cross_entropy(logits, targets))


@pytest.mark.parametrize("sequences", [1, 4])
def test_logits_in_pieces(sequences: int) -> None:
    head, x = nn.Linear(8, 5), torch.randn(sequences, 3, 8)
    torch.testing.assert_close(by_hand.in_pieces(head, x), head(x))


GIVE = ((1, 2), (3, 1))  # rows of each rank for each


def _exchange(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    give, take = GIVE[rank], [GIVE[other][rank] for other in range(2)]
    x = torch.arange(sum(give), dtype=torch.float32).add(10 * rank).unsqueeze(1).requires_grad_()
    came = to_owners(x, give, take)
    (came * (rank + 1)).sum().backward()  # type: ignore[no-untyped-call]
    torch.save((came.detach().flatten(), x.grad), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_rows_go_to_their_owners_and_gradients_come_back(tmp_path: object) -> None:
    spawn(_exchange, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    (first, its), (second, others) = (torch.load(f"{tmp_path}/{rank}.pt") for rank in range(2))
    assert first.tolist() == [0, 10, 11, 12]
    assert second.tolist() == [1, 2, 13]
    # What rank 1 got counts twice.
    assert its.flatten().tolist() == [1, 2, 2]
    assert others.flatten().tolist() == [1, 1, 1, 2]


DEFAULTS = {"cpu": {"width": 1}, "cuda": {"width": 9}}


def read(*argv: str) -> argparse.Namespace:
    parser = job.options("Train a model.\n\nMore.", {"late": "straggler"})
    parser.add_argument("--width", type=int)
    parser.add_argument("--log-every", type=int, default=2)
    return job.read(parser, list(argv), DEFAULTS, needs_two_ranks=["late"])


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


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as published with the models' weights in torchvision
        ("alexnet", 61_100_840),
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
        ("vgg19", 143_667_240),
    ],
)
def test_models_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = build_model(name, classes=1000, small=False)
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_lars_scales_each_layers_step_to_its_weights() -> None:
    model = torch.nn.Linear(3, 2)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = Lars(model, lr=2.0, momentum=0.9, weight_decay=0.1)
    gradients = [torch.randn_like(p) for p in before]
    for _ in range(2):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    # The paper's equations, a layer at a time; its velocity holds the rate, which is the same in both steps.
    w, b = before
    velocity = torch.zeros_like(w)
    for _ in range(2):
        local = 0.001 * w.norm() / (gradients[0].norm() + 0.1 * w.norm())
        velocity = 0.9 * velocity + 2.0 * local * (gradients[0] + 0.1 * w)
        w = w - velocity
    torch.testing.assert_close(model.weight.detach(), w)
    torch.testing.assert_close(model.bias.detach(), b - 2.0 * (1 + 1.9) * gradients[1])


def test_lamb_scales_each_layers_step_to_its_weights() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3, 2))
    optimizer = Lamb([weight], lr=0.1, weight_decay=0.5)
    w, gradients = weight.detach().clone(), [torch.randn(3, 2), torch.randn(3, 2)]
    mean, square = torch.zeros_like(w), torch.zeros_like(w)
    for n, gradient in enumerate(gradients, 1):
        weight.grad = gradient.clone()
        optimizer.step()
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        step = (mean / (1 - 0.9**n)) / ((square / (1 - 0.999**n)).sqrt() + 1e-6) + 0.5 * w
        w = w - 0.1 * w.norm() / step.norm() * step
    torch.testing.assert_close(weight.detach(), w)
