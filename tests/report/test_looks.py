"""How categories are drawn."""

from __future__ import annotations

from dlprof.report import looks
from dlprof.result import CATEGORIES


def test_every_category_is_drawn_and_none_like_another() -> None:
    assert tuple(looks.LOOKS) == CATEGORIES
    for kind in ("name", "light", "dark", "ansi", "glyph"):
        assert len({getattr(look, kind) for look in looks.LOOKS.values()}) == len(CATEGORIES), kind
