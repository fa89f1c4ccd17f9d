"""What puts the ranks of a job into a container, Apptainer's or that of pyxis, with the run folder and the recorder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Runtime = Literal["apptainer", "pyxis"]

# The recorder is found by its place, and inside a container it has the same one.
PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Container:
    """An image and what runs it.

    Apptainer starts a command: dlprof stays outside, where all that it needs is installed, and its package is bound
    into the container, where the recorder needs Python and torch alone. pyxis is srun's own: it puts all of a task into
    the container, dlprof too, and the image must have it.
    """

    image: str
    runtime: Runtime

    @property
    def holds_dlprof(self) -> bool:
        """Whether dlprof itself runs inside."""
        return self.runtime == "pyxis"

    def of_srun(self, places: Iterable[Path]) -> list[str]:
        """Return the options of srun; `places`: what is there inside as outside, the first as working directory."""
        if self.runtime != "pyxis":
            return []
        first, *rest = places
        mounts = ",".join(f"{place}:{place}" for place in _outermost([first, *rest]))
        return [f"--container-image={self.image}", f"--container-mounts={mounts}", f"--container-workdir={first}"]

    def of_command(self, places: Iterable[Path], gpus: bool) -> list[str]:
        """Return the words before the command that trains."""
        if self.runtime != "apptainer":
            return []
        first, *rest = places
        binds = [word for place in _outermost([first, *rest, PACKAGE]) for word in ("--bind", str(place))]
        return ["apptainer", "exec", *(["--nv"] if gpus else []), *binds, "--pwd", str(first), self.image]


def _outermost(places: Sequence[Path]) -> list[Path]:
    """Return these folders without those that are in another of them, each once."""
    kept = list[Path]()
    for place in places:
        if not any(place.is_relative_to(other) for other in kept):
            kept = [other for other in kept if not other.is_relative_to(place)] + [place]
    return kept
