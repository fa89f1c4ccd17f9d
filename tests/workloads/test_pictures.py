"""The drawn pictures are real files, the same wherever they are made; patterns can be told apart."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from parts.pictures import Pictures, draw_picture, make_pictures, normalised
from torch import Tensor


def unchanged(pixels: Tensor) -> Tensor:
    return pixels


def test_the_pictures_are_those_that_older_results_were_recorded_with() -> None:
    drawn = b"".join(draw_picture("cifar", n, np.random.default_rng([0, n])).tobytes() for n in range(10))
    assert hashlib.sha256(drawn).hexdigest() == "ee55bcfac7fc0d48815aa11c526281b9a71cf372670543e88a3dbf82655cb541"


def test_damaged_pictures_are_refused(tmp_path: Path) -> None:
    folder = make_pictures(tmp_path, "cifar", 4)
    pictures = Pictures(folder / "train", "cifar", True, 0.0, unchanged)
    whole = pictures.files[0].read_bytes()
    for damaged in (b"GIF89a" + whole, whole[:-200], whole[:40], whole[:60] + bytes([whole[60] ^ 1]) + whole[61:]):
        pictures.files[0].write_bytes(damaged)
        with pytest.raises((OSError, SyntaxError)):
            pictures[0]


def test_what_is_missing_without_pillow_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SystemExit, match=r"need Pillow: pip install pillow"):
        make_pictures(tmp_path, "cifar", 4)


def test_augmentation_changes_training_pictures_only(tmp_path: Path) -> None:
    folder = make_pictures(tmp_path, "cifar", 6)
    torch.manual_seed(0)
    for training, versions in ((True, 8), (False, 1)):
        pictures = Pictures(folder / "train", "cifar", training, 0.0, unchanged)
        assert len({pictures[0][0].numpy().tobytes() for _ in range(8)}) == versions


@pytest.mark.parametrize("channels_last", [True, False])
def test_pixels_become_planes_around_zero(channels_last: bool) -> None:
    pixels = torch.tensor([0, 255], dtype=torch.uint8).repeat(2, 4, 8, 2)[..., :3]  # 2 pictures of 4 × 8
    planes = normalised(pixels, channels_last)
    assert planes.shape == (2, 3, 4, 8)
    assert planes.is_contiguous(memory_format=torch.channels_last) == channels_last
    assert float(planes.abs().min()) == float(planes.abs().max()) == 127.5 / 32
