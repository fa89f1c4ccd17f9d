"""How categories are drawn: each in a colour of its own, to every eye."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from dlprof.report import looks
from dlprof.result import CATEGORIES

# What protanopia, deuteranopia and tritanopia make of linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
_EYES = (
    np.eye(3),
    np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
)


def test_every_category_is_drawn_and_none_like_another() -> None:
    assert tuple(looks.LOOKS) == CATEGORIES
    for kind in ("name", "light", "dark", "ansi", "glyph"):
        assert len({getattr(look, kind) for look in looks.LOOKS.values()}) == len(CATEGORIES), kind
    for kind in ("name", "light", "dark"):
        assert len({getattr(look, kind) for look in looks.DRAWN.values()}) == len(looks.DRAWN), kind


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_passes_differ_from_all_else_and_each_other_to_every_eye(theme: str) -> None:
    names = list(looks.DRAWN)
    colours = np.array([linear(getattr(looks.DRAWN[name], theme)) for name in names])
    for eye in _EYES:
        seen = oklab(colours @ eye.T)
        apart = np.linalg.norm(seen[:, None] - seen[None], axis=2) + np.eye(len(names))
        # A just noticeable difference is about 0.02.
        near = [
            (a, names[int(apart[i].argmin())])
            for i, a in enumerate(names)
            if a in looks.PASSES and apart[i].min() < 0.03
        ]
        assert near == []


def linear(colour: str) -> NDArray[np.float64]:
    """Return a colour, "#4477aa", in linear RGB."""
    one = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(one <= 0.04045, one / 12.92, ((one + 0.055) / 1.055) ** 2.4)


def oklab(colours: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return linear RGB in Oklab (Ottosson 2020), in which distances are about as they are seen."""
    to_lms = np.array(
        [[0.41222147, 0.53633254, 0.05144599], [0.2119035, 0.68069955, 0.10739696], [0.08830246, 0.28171884, 0.6299787]]
    )
    to_lab = np.array(
        [
            [0.21045426, 0.79361778, -0.00407205],
            [1.9779985, -2.42859221, 0.45059371],
            [0.02590404, 0.78277177, -0.80867577],
        ]
    )
    lab: NDArray[np.float64] = np.cbrt(np.clip(colours, 0, 1) @ to_lms.T) @ to_lab.T
    return lab
