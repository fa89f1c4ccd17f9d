"""What `dlprof.open` returns: a run and its measures, as pandas frames and plotly figures.

Times are nanoseconds (`_ns`) and sizes bytes (`_bytes`), as the names of the columns say; instants are Unix time. What
is not known is NA, and what a run does not have raises NotMeasured, with the reason.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlprof.errors import DlprofError, DoesNotApply, NotMeasured
from dlprof.units import count

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects

    from dlprof.analysis.engine import Measure, Measured
    from dlprof.read.run import Run as Files
    from dlprof.report.figures.drawing import Figure
    from dlprof.result import Result


# The calls of a run that have a figure of the same name, each with what its bars, or lines, are.
CALLS = {
    "breakdown": "The exclusive parts of each rank's mean step",
    "kernels": "Kernels, collectives and copies, in a mean traced step, mean of the ranks",
    "idle": "What each rank's device waits for in its mean step",
    "overlap": "Communication of each rank's mean traced step",
    "queue": "Launches queued for the device",
}

# What a device does while it does not idle, of the parts of a step.
_BUSY = ("computation", "communication", "copy")

# Columns of numbers that may be below zero; in any other −1 stands for what is not known.
_SIGNED = re.compile("after|again|ahead|gain|imbalance|longer|offset|saved")

# Measures that say why a field of a result's window is None, where they have another name.
_SAYS = {"flops": "arithmetic", "mfu": "arithmetic", "lag_ns": "device_lag", "memory_bytes": "most_memory"}


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

    def breakdown(self) -> pd.DataFrame:
        """Return the mean steady step of each rank (the index) and its exclusive parts, which add up to it.

        Columns: step_ns, and for each part that any rank has its NAME_ns: computation_ns, communication_ns (that no
        computation overlaps), copy_ns, input_wait_ns, host_ns, … Raises NotMeasured where no step is known.
        """
        from dlprof.result import CATEGORIES

        wide = self.frame("breakdown").pivot(index="rank", columns="category", values="ns").fillna(0.0)
        wide = wide[[part for part in CATEGORIES if part in wide]].add_suffix("_ns").rename_axis(columns=None)
        wide.insert(0, "step_ns", wide.sum(axis="columns"))
        return wide

    def kernels(self) -> pd.DataFrame:
        """Return what a device does in each rank's mean traced step, the longest first.

        Columns: rank, kind (computation, communication, copy), name, calls, ns (of the device, overlapped or not),
        share (of all the rank's rows). Of a rank the 200 longest kernels at most. Raises NotMeasured where no device
        was traced, and DoesNotApply where the job trains on the CPU.
        """
        import pandas as pd

        self._need_device()
        work = self.frame("work")
        rows = [work[work["kind"] == "kernel"].assign(kind="computation")]
        with suppress(NotMeasured):  # which of the device's work communicates
            made = self.frame("collectives").rename(columns={"collective": "name"})
            made["ns"] = made["end_ns"] - made["start_ns"]
            by = made.groupby(["rank", "name"], as_index=False, observed=True)["ns"].agg(calls="size", ns="sum")
            steps = by["rank"].map(self.frame("window_steps").groupby("rank").size())
            rows.append(by.assign(kind="communication", calls=by["calls"] / steps, ns=by["ns"] / steps))
        with suppress(NotMeasured):
            copies = self.frame("copies").rename(columns={"count": "calls", "copy_ns": "ns"})
            name = (copies["copy"].astype(str) + " " + copies["memory"].astype(str)).str.strip()
            rows.append(copies.assign(kind="copy", name=name))
        if not any(map(len, rows)):
            raise NotMeasured("no kernel, collective or copy ran in the traced steps")
        columns = ["rank", "kind", "name", "calls", "ns"]
        every = pd.concat([of[columns] for of in rows if len(of)], ignore_index=True)
        every["share"] = every["ns"] / every.groupby("rank")["ns"].transform("sum")
        return every.sort_values(["rank", "ns"], ascending=[True, False], kind="stable", ignore_index=True)

    def idle(self) -> pd.DataFrame:
        """Return why each rank's device does nothing in its mean steady step, the longest first.

        Columns: rank, category (input_wait, host, launch_latency, queued_wait, …), ns, share (of the step). Raises
        NotMeasured where no device was traced, and DoesNotApply where the job trains on the CPU.
        """
        self._need_device()
        parts = self.frame("breakdown")
        parts["share"] = parts["ns"] / parts.groupby("rank")["ns"].transform("sum")
        traced = parts["rank"].isin(self.frame("device_time")["rank"])
        idle = parts[traced & ~parts["category"].isin(_BUSY)][["rank", "category", "ns", "share"]]
        return idle.sort_values(["rank", "ns"], ascending=[True, False], kind="stable", ignore_index=True)

    def overlap(self) -> pd.DataFrame:
        """Return how much of each rank's communication computation hides, in the mean traced step.

        Columns: rank, communication_ns, hidden_ns (computation runs meanwhile), exposed_ns (none does), hidden_share
        (of communication_ns; NA where the rank has none). Raises NotMeasured where nothing was traced, and DoesNotApply
        where no rank communicates.
        """
        hidden = self.frame("overlap").set_index("rank")["beside_ns"]
        exposed, steps = self.frame("exposed"), self.frame("window_steps").groupby("rank").size()
        exposed_ns = (exposed["end_ns"] - exposed["start_ns"]).groupby(exposed["rank"]).sum() / steps
        frame = hidden.to_frame("hidden_ns").assign(exposed_ns=exposed_ns).fillna({"exposed_ns": 0.0})
        frame.insert(0, "communication_ns", frame.sum(axis="columns"))
        if not frame["communication_ns"].any():
            raise DoesNotApply("no rank communicates in the traced steps")
        frame["hidden_share"] = frame["hidden_ns"] / frame["communication_ns"].where(frame["communication_ns"] > 0)
        return frame.reset_index()

    def queue(self) -> pd.DataFrame:
        """Return how many launches wait for each rank's device to start them, over its steady traced steps.

        Columns: rank, mean, std, min, 25%, 50%, 75%, max (launches), and lag_ns, how far the device is behind the host
        where a step begins. `frame("queue_series")` has the series. Raises NotMeasured where the trace does not link
        launches to kernels, and DoesNotApply where the job trains on the CPU.
        """
        self._need_device()
        found = self.frame("queue_series").groupby("rank")["queued"].describe().drop(columns="count")
        return found.join(self.frame("device_lag").set_index("rank")["lag_ns"]).reset_index()

    def compare(self, other: Run | str | os.PathLike[str]) -> pd.DataFrame:
        """Return what another run, or the one at a path, takes longer or shorter than this one, of the mean step.

        A row for the step, each part of it, and each collective, kernel, operator and range, in this order: kind,
        name, a_ns (of this run), b_ns (of the other), change_ns (b − a), noise_ns (its standard error), verdict
        (faster, slower, noise or unknown), a_calls, b_calls; NA: not known, or not there. `attrs["doubts"]` has what to
        know before trusting the differences, `attrs["not_compared"]` what was left out. Raises NotMeasured where the
        steps of the two cannot be compared, and DlprofError where the path cannot be opened.
        """
        import pandas as pd

        from dlprof.analysis.compare import code, comparison
        from dlprof.read.run import open_run

        run = other if isinstance(other, Run) else Run(open_run(other))
        lines = code.changed(self.result, run.result, self.path, run.path)
        found = comparison.to_json(comparison.compare(self.result, run.result, lines))
        if not found["step"]:
            raise NotMeasured("; ".join(found["not_compared"]))
        kinds = {"part": "time", **{kind[:-1]: kind for kind in ("collectives", "kernels", "operators", "ranges")}}
        rows = [{"kind": "step", **found["step"]}]
        rows += [{"kind": kind, **row} for kind, field in kinds.items() for row in found[field]]
        columns = ["kind", "name", "a_ns", "b_ns", "change_ns", "noise_ns", "verdict", "a_calls", "b_calls"]
        frame = pd.DataFrame(rows).rename(columns={"ns": "change_ns"}).reindex(columns=columns)
        frame.attrs = {name: found[name] for name in ("doubts", "not_compared")}
        return frame

    def _need_device(self) -> None:
        from dlprof.analysis import settings

        if settings.on_cpu(self._measured.job):
            raise DoesNotApply("the job trains on the CPU: no device computes or waits in it")
        self.frame("device_time")

    def part(self, name: str) -> Any:
        """Return what the result, or its window, has under a name: `throughput`, `footprint` or `device_work`, say.

        Raises NotMeasured, with the reason, where that is None or empty, and DlprofError for an unknown name.
        """
        from dlprof.analysis.engine import Measure, needs_of
        from dlprof.analysis.figures import FIELDS
        from dlprof.result import Result, Window

        mine = Result.__struct_fields__
        if name not in (*mine, *Window.__struct_fields__):
            raise DlprofError(_no(f"part {name!r}", name, (*mine, *Window.__struct_fields__)))
        found = getattr(self.result if name in mine else self.part("window"), name)
        if found is not None and found != ():
            return found
        if name in FIELDS or name not in mine:
            needed = needs_of(FIELDS.get(name, FIELDS["window"]))
            need = needed.get(_SAYS.get(name, name)) or next(iter(needed.values()))
            says = self._measured.frame(need.of) if isinstance(need.of, Measure) else {}  # or raises why not
            if "why" in getattr(says, "columns", ()) and (why := str(says["why"].iloc[0])):
                raise NotMeasured(why)
        raise NotMeasured("nothing was tried (dlprof try)" if name == "tried" else f"this run has no {name}")

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
        return _with_na(RankData(self._files.ranks[self.ranks.index(rank)]).table("spans"))

    def frames(self) -> pd.DataFrame:
        """Return the names of all frames, a row each, by what they are about: group, name, what, help (its columns)."""
        import pandas as pd

        rows = []
        for name, measure in self._frames.items():
            text = _described(inspect.getdoc(measure.function) or "")
            first = " ".join(text.partition("\n\n")[0].split()).partition(". ")[0]
            rows.append((measure.function.__module__.split(".")[2], name, first.rstrip(".") + ".", text))
        return pd.DataFrame(sorted(rows), columns=["group", "name", "what", "help"])

    def frame(self, name: str) -> pd.DataFrame:
        """Return a measure of all ranks by its name, `breakdown` say; `frames` lists them.

        Raises DlprofError for an unknown name, and NotMeasured with the reason where it is not known.
        """
        if name not in self._frames:
            raise DlprofError(_no(f"frame {name!r}", name, self._frames))
        return _with_na(self._measured.frame(self._frames[name]))

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
        """Return the figures that this run has, a row each: name, title. Those of the calls come first."""
        import pandas as pd

        from dlprof.analysis.engine import MeasureFailed

        rows = []
        for name, title in CALLS.items():
            with suppress(NotMeasured, MeasureFailed):
                getattr(self, name)()
                rows.append((name, title))
        rest = {name: figure.title or figure.label for name, figure in self._figures.items() if name not in CALLS}
        rows += [(name, title) for name, title in rest.items() if title not in CALLS.values()]
        return pd.DataFrame(rows, columns=["name", "title"])

    def figure(self, name: str, other: Run | str | os.PathLike[str] | None = None) -> plotly.graph_objects.Figure:
        """Return a figure: of a call by its name (`kernels`, `idle`), or another one of the page; `figures` lists them.

        `figure("compare", other)` draws what `compare(other)` returns. Raises DlprofError for a name that this run does
        not have, and NotMeasured, with the reason, where its call does.
        """
        import plotly.graph_objects as go

        if name in CALLS or (name == "compare" and other is not None):
            drawn = self._of_call(name, other)
        elif name in self._figures:
            drawn = self._figures[name]
        else:
            raise DlprofError(_no(f"figure {name!r}", name, (*self._figures, *CALLS)))
        spec = drawn.spec or {}
        return go.Figure(data=spec.get("data"), layout=spec.get("layout"), skip_invalid=True)

    def _of_call(self, name: str, other: Run | str | os.PathLike[str] | None) -> Figure:
        from dlprof.analysis.panels.host import queue_length
        from dlprof.report import formatting
        from dlprof.report.figures import parts, shapes
        from dlprof.result import Panel

        frame = self.compare(other) if name == "compare" and other is not None else getattr(self, name)()
        if name == "breakdown":
            return self._figures[name]
        if name == "queue":
            return shapes.panel(queue_length(self.frame("queue_series"), frame["lag_ns"]))
        if name == "kernels":
            sums = frame.groupby(["name", "kind"], sort=False)["ns"].sum().nlargest(shapes.HORIZONTAL)
            labels = formatting.kernels([kernel for kernel, _ in sums.index])
            means = (sums / frame["rank"].nunique()).tolist()
            rows = zip(labels, means, (kind for _, kind in sums.index), strict=True)
            return shapes.panel(Panel("bars", CALLS[name], tuple(rows), unit="ns"))
        if name == "overlap":
            wide = frame.set_index("rank")[["exposed_ns", "hidden_ns"]].set_axis(["communication", "hidden"], axis=1)
        elif name == "idle":
            wide = frame.pivot(index="rank", columns="category", values="ns").fillna(0.0)
        else:
            wide = (
                frame[frame["kind"].isin(("step", "part"))]
                .set_index("name")[["a_ns", "b_ns"]]
                .set_axis(["a", "b"], axis=1)
            )
        labels = [str(label) if name == "compare" else f"rank {label}" for label in wide.index]
        bars = [
            (label, {str(c): float(row[c]) for c in wide})
            for label, (_, row) in zip(labels, wide.iterrows(), strict=True)
        ]
        return parts.beside(bars, stacked=name != "compare")

    def __repr__(self) -> str:
        kind = "run" if self._files.recorded else "traces"
        return f"<dlprof.Run: {kind} {str(self.path)!r}, {count(len(self.ranks), 'rank')}>"

    def _repr_html_(self) -> str:
        """Return the verdict for a notebook."""
        from dlprof.report.notebook import render

        return render(self.result)


def _with_na(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a copy in which what is not known is NA, where measures and tables have −1 for it."""
    from pandas.api import types

    frame = frame.copy()
    for name, column in frame.items():
        if types.is_numeric_dtype(column) and not types.is_bool_dtype(column) and not _SIGNED.search(str(name)):
            unknown = column == -1
            if unknown.any():
                frame[name] = (column.astype("Int64") if types.is_integer_dtype(column) else column).mask(unknown)
    return frame


def _described(text: str) -> str:
    """Return what a measure returns, said of its frame as a user gets it."""
    text = re.sub(r"(?<![\w.])[−-]1(?=[:,;).]|$)", "NA", re.sub(r"\AReturn,? ", "", text))
    return text[:1].upper() + text[1:]


def _identifier(title: str) -> str:
    return "_".join("".join(c if c.isalnum() else " " for c in title.lower()).split())


def _no(what: str, name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 3)
    return f"no {what}; " + (f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(sorted(known))}")
