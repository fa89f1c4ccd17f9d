"""What panels are made with: figures of the run as data, which the page draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import pandas as pd
from msgspec import Struct

from dlprof.analysis.engine import Measured, MeasureFailed, check_needs
from dlprof.errors import NotMeasured
from dlprof.result import Panel

# The phases of the training thread, each with the category of its colour.
PHASES = {"fetch": "input_wait", "forward": "forward", "backward": "backward", "optimizer": "optimizer_host"}

# Lines of more ranks cannot be distinguished in one chart.
MOST_RANKS = 8


class Picture(Struct, frozen=True):
    """One or more panels of the report. The parameters of `draw` name what it needs; it may raise NotMeasured."""

    draw: Callable[..., list[Panel]]

    def __post_init__(self) -> None:
        check_needs(self.draw)


def drawn(run: Measured, pictures: Iterable[Picture]) -> tuple[Panel, ...]:
    """Return the panels of the run that could be measured, in the order of the pictures."""
    panels: list[Panel] = []
    for picture in pictures:
        with suppress(NotMeasured, MeasureFailed):
            panels += run.call(picture.draw)
    return tuple(panels)


def points(table: pd.DataFrame) -> tuple[tuple[Any, ...], ...]:
    """Return the rows of a panel of lines: the index, then each line's value there, None where there is none."""
    return tuple(
        (int(at), *(None if pd.isna(v) else float(v) for v in values))
        for at, values in zip(table.index, table.to_numpy(), strict=True)
    )


def cells(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with None where a value is missing, and each cell a plain Python value."""
    return table.astype(object).where(table.notna(), None)


def table(
    title: str, frame: pd.DataFrame, columns: Mapping[str, str], most: int | None = None, note: str = ""
) -> Panel:
    """Return the panel of a frame's first rows: those columns of it, each with its heading, in which a unit may end."""
    return Panel(
        "table", title, rows(frame[list(columns)].head(most or len(frame))), tuple(columns.values()), note=note
    )


def named(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a frame with a column `name` that names the rank of each row."""
    return frame.assign(name=[f"rank {rank}" for rank in frame["rank"]])


def rows(table: pd.DataFrame) -> tuple[tuple[Any, ...], ...]:
    """Return the rows of a panel's table: each cell, None where there is none."""
    return tuple(cells(table).itertuples(index=False, name=None))
