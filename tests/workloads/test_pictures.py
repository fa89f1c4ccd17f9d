"""The drawn pictures are real files, the same wherever they are made; patterns can be told apart."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from parts.pictures import Patterns, Pictures, draw_picture, make_pictures, normalised
from PIL import Image
from torch import Tensor

from tests.workloads import FOLDER


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


def test_pictures_are_the_same_wherever_they_are_made(tmp_path: Path) -> None:
    folders = [make_pictures(tmp_path / name, "cifar", 40) for name in ("a", "b")]
    files = [sorted(p.relative_to(folder) for p in folder.rglob("*.png")) for folder in folders]
    assert files[0] == files[1]
    assert len(files[0]) == 40 + 5
    contents = [[(folder / file).read_bytes() for file in files[0]] for folder in folders]
    assert contents[0] == contents[1]
    assert len(set(contents[0])) == 45


def test_augmentation_changes_training_pictures_only(tmp_path: Path) -> None:
    folder = make_pictures(tmp_path, "cifar", 6)
    torch.manual_seed(0)
    for training, versions in ((True, 8), (False, 1)):
        pictures = Pictures(folder / "train", "cifar", training, 0.0, unchanged)
        assert len({pictures[0][0].numpy().tobytes() for _ in range(8)}) == versions


@pytest.mark.long
def test_interrupted_drawing_is_done_again(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); from pathlib import Path; import parts.pictures as p;"
    code += f"p.make_pictures(Path({str(tmp_path)!r}), 'cifar', 4000)"
    partial, folder = tmp_path / "cifar-4000.partial", tmp_path / "cifar-4000"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL) as drawing:
        while not any(partial.rglob("*.png")):
            assert drawing.poll() is None
            time.sleep(0.01)
        drawing.kill()
    assert not folder.exists()
    (partial / "train" / "0000").mkdir(exist_ok=True)
    (partial / "train" / "0000" / "999999.png").write_bytes(b"half a pic")

    make_pictures(tmp_path, "cifar", 4000)
    assert not partial.exists()
    files = list(folder.rglob("*.png"))
    assert len(files) == 4500
    assert all(np.array(Image.open(file)).shape == (32, 32, 3) for file in files)


@pytest.mark.parametrize("channels_last", [True, False])
def test_pixels_become_planes_around_zero(channels_last: bool) -> None:
    pixels = torch.tensor([0, 255], dtype=torch.uint8).repeat(2, 4, 8, 2)[..., :3]  # 2 pictures of 4 × 8
    planes = normalised(pixels, channels_last)
    assert planes.shape == (2, 3, 4, 8)
    assert planes.is_contiguous(memory_format=torch.channels_last) == channels_last
    assert float(planes.abs().min()) == float(planes.abs().max()) == 127.5 / 32


def test_a_class_looks_alike_and_its_pictures_differ() -> None:
    pictures = Patterns(40, 16, seed=0)
    (a, label), (b, same), (_, other) = (pictures[i] for i in (3, 13, 4))
    assert label == same != other
    assert 0 < float((a - b).abs().mean()) < 2
    assert not torch.equal(a, Patterns(40, 16, seed=1)[3][0])
