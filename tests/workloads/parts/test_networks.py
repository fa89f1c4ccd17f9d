"""The convolutional networks have the sizes of their papers."""

from __future__ import annotations

import pytest
import torch
from parts.networks import build_model, small_network


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


def test_resnet20_has_the_papers_size() -> None:
    with torch.device("meta"):
        model = build_model("resnet20", classes=10, small=True)
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 10)
    # The paper's table 6 says 0.27 M, with shortcuts that have no weights. Ours are 1×1 projections: 2,752 more.
    assert sum(p.numel() for p in model.parameters()) == 269_722 + (16 * 32 + 2 * 32) + (32 * 64 + 2 * 64)


@pytest.mark.parametrize("name", ["alexnet", "vgg19"])
def test_models_take_small_pictures_too(name: str) -> None:
    with torch.device("meta"):
        assert build_model(name, classes=10, small=True)(torch.empty(2, 3, 32, 32)).shape == (2, 10)


def test_the_small_network_doubles_its_width_twice_and_takes_pictures_of_any_size() -> None:
    with torch.device("meta"):
        network = small_network(4, classes=10)
        assert [network(torch.empty(2, 3, size, size)).shape for size in (16, 128)] == [(2, 10), (2, 10)]
    widths = [m.out_channels for m in network if isinstance(m, torch.nn.Conv2d)]
    assert widths == [4, 4, 8, 8, 16, 16]
