"""What FSDP2 does on the host around its units: gathering parameters, freeing them, reducing their gradients."""

from __future__ import annotations

import re

import pandas as pd

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import Maybe, per_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.steps import Timing
from dlprof.errors import NotMeasured

# FSDP2 names what it does, and the module that it does it for; the outermost one has no name.
_NAME = re.compile(r"FSDP::pre_forward(?: \(([^,)]*).*\))?$")


@per_rank
def sharding(
    on_training_thread: pd.DataFrame, timing: Timing, exposed_communication: Maybe[iv.Intervals]
) -> pd.DataFrame:
    """Return one row: units (modules that FSDP2 shards by themselves), parents (modules right above them), around_ns.

    around_ns is what the training thread spends in FSDP2 in a mean steady step, exposed communication left out. Of the
    outermost unit the parent is itself. Raises NotMeasured where nothing names FSDP2's work.
    """
    theirs = on_training_thread[host.is_named(on_training_thread, "FSDP::")]
    names = [_NAME.match(str(n)) for n in theirs["name"].unique()]
    units = {found[1] or "" for found in names if found}
    if not units or not len(timing.windows):
        raise NotMeasured("no work of FSDP2's was traced")
    spent = iv.intersect(iv.merge(timing.windows), iv.subtract(host.cover(theirs), exposed_communication.get()))
    # The traced steps are longer than the others, this part of them alike.
    traced = iv.total(iv.merge(timing.windows)) / len(timing.windows)
    around = iv.total(spent) / len(timing.windows) * timing.step_ns / traced
    parents = {unit.rpartition(".")[0] for unit in units}
    return pd.DataFrame({"units": [len(units)], "parents": [len(parents)], "around_ns": [around]})
