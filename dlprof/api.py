"""What `dlprof.open` returns: a run and its measures, as pandas frames and plotly figures.

Times are nanoseconds (`_ns`) and sizes bytes (`_bytes`), as the names of the columns say; instants are Unix time.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dlprof.errors import DlprofError
from dlprof.units import count

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects

    from dlprof.analysis.engine import Measure, Measured
    from dlprof.read.run import Run as Files
    from dlprof.report.figures.drawing import Figure
    from dlprof.result import Result


class Run:
    """A recorded run, or traces from anywhere. A file is read once, when it is first needed.

    `path`: its folder, or the trace file. `ranks`: those that left something. `command`: as it was recorded, empty for
    traces from elsewhere. `hosts`: as far as they were recorded. `warnings`: what is odd about the files;
    `result.run.warnings` has all.
    """

    def __init__(self, files: Files, jobs: int | None = None) -> None:
        self._files, self._jobs = files, jobs

        self.path: Path = files.path
        self.ranks: tuple[int, ...] = tuple(rank.index for rank in files.ranks)
        self.command: tuple[str, ...] = files.command
        self.hosts: tuple[str, ...] = files.hosts
        self.warnings: tuple[str, ...] = files.warnings

    @cached_property
    def _measured(self) -> Measured:
        from dlprof.analysis.diagnosis import wanted
        from dlprof.analysis.engine import measure
        from dlprof.analysis.rules import RULES

        return measure(self._files, (*wanted(RULES), *self._frames.values()), self._jobs)

    @cached_property
    def _frames(self) -> dict[str, Measure[pd.DataFrame]]:
        from dlprof.analysis.diagnosis import every_frame
        from dlprof.analysis.rules import RULES

        return {m.name: m for m in every_frame(RULES)}

    @cached_property
    def result(self) -> Result:
        """The diagnosis, as `result.json` holds it."""
        from dlprof.analysis.diagnosis import diagnosed
        from dlprof.analysis.rules import RULES
        from dlprof.trial.job import with_tried

        return with_tried(diagnosed(self._measured, RULES), self.path)

    @property
    def findings(self) -> pd.DataFrame:
        """What was found, the largest saving first, a row each: id, title, saving_ns, noise_ns, share, speedup, ranks,
        summary, training, changes. Last come those with `training`: what is saved only if the job trains otherwise.

        Savings are of the mean steady step and overlap: they are not to be summed.
        """
        import pandas as pd

        columns = ("id", "title", "saving_ns", "noise_ns", "share", "speedup", "ranks", "summary", "training")
        found = (*self.result.found, *self.result.if_training_may_change)
        rows = [{c: getattr(o, c) for c in columns} | {"changes": o.advice} for o in found]
        return pd.DataFrame(rows, columns=[*columns, "changes"])

    def steps(self) -> pd.DataFrame:
        """Return the steps of all ranks, thinned where there are many: rank, step, kind, start_ns, dur_ns, phases."""
        return self.frame("step_series")

    def spans(self, rank: int) -> pd.DataFrame:
        """Return the events of a rank's trace: lane, kind, name, start_ns, dur_ns and what else dlprof/schema.py says.

        Raises DlprofError if there is no such rank, or it has no trace.
        """
        from dlprof.analysis.engine import RankData

        if rank not in self.ranks:
            raise DlprofError(f"no rank {rank}; there are: {', '.join(map(str, self.ranks))}")
        return RankData(self._files.ranks[self.ranks.index(rank)]).table("spans")

    def frames(self) -> pd.DataFrame:
        """Return the names of all frames and what each is, a row each: name, what, help (with its columns)."""
        import pandas as pd

        texts = {name: inspect.getdoc(measure.function) or "" for name, measure in self._frames.items()}
        first = {n: " ".join(text.partition("\n\n")[0].split()).partition(". ")[0] for n, text in texts.items()}
        rows = [(name, first[name].rstrip(".") + ".", text) for name, text in texts.items()]
        return pd.DataFrame(rows, columns=["name", "what", "help"])

    def frame(self, name: str) -> pd.DataFrame:
        """Return a measure of all ranks by its name, `breakdown` say; `frames` lists them.

        Raises DlprofError for an unknown name, and NotMeasured with the reason where it is not known.
        """
        if name not in self._frames:
            raise DlprofError(_no(f"frame {name!r}", name, self._frames))
        return self._measured.frame(self._frames[name]).copy()

    @cached_property
    def _figures(self) -> dict[str, Figure]:
        from dlprof.report.figures import modules, parts, shapes

        found = {"breakdown": parts.stack(self.result), "blame": parts.blame(self.result)}
        found |= modules.specs(modules.shown(self.result))
        found |= {o.id: shapes.panel(o.evidence) for o in self.result.outcomes if o.evidence}
        for panel in self.result.panels:
            name = panel.shape if panel.shape == "timeline" else _identifier(panel.title)
            found.setdefault(name, shapes.panel(panel))
        return {name: figure for name, figure in found.items() if figure is not None and figure.spec is not None}

    def figures(self) -> pd.DataFrame:
        """Return the figures that this run has, a row each: name, title."""
        import pandas as pd

        rows = [(name, figure.title or figure.label) for name, figure in self._figures.items()]
        return pd.DataFrame(rows, columns=["name", "title"])

    def figure(self, name: str) -> plotly.graph_objects.Figure:
        """Return a figure of the report by its name, `breakdown` or `timeline` say; `figures` lists them.

        Raises DlprofError for one that this run does not have.
        """
        import plotly.graph_objects as go

        if name not in self._figures:
            raise DlprofError(_no(f"figure {name!r}", name, self._figures))
        spec = self._figures[name].spec or {}
        return go.Figure(data=spec.get("data"), layout=spec.get("layout"), skip_invalid=True)

    def __repr__(self) -> str:
        kind = "run" if self._files.recorded else "traces"
        return f"<dlprof.Run: {kind} {str(self.path)!r}, {count(len(self.ranks), 'rank')}>"

    def _repr_html_(self) -> str:
        """Return the verdict for a notebook."""
        from dlprof.report.notebook import render

        return render(self.result)


def _identifier(title: str) -> str:
    return "_".join("".join(c if c.isalnum() else " " for c in title.lower()).split())


def _no(what: str, name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 3)
    return f"no {what}; " + (f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(sorted(known))}")
