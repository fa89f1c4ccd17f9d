"""What FSDP2 does on the host around its units: gathering parameters, freeing them, reducing their gradients."""

from __future__ import annotations

import re

import pandas as pd

from dlprof import intervals as iv
from dlprof.engine import RankData, per_rank
from dlprof.errors import NotMeasured
from dlprof.measures import breakdown
from dlprof.timeline import host
from dlprof.timeline.steps import timing

# FSDP2 names what it does, and the module that it does it for; the outermost one has no name.
_NAME = re.compile(r"FSDP::pre_forward(?: \(([^,)]*).*\))?$")


@per_rank
def sharding(rank: RankData) -> pd.DataFrame:
    """Return one row: units (modules that FSDP2 shards by themselves), parents (modules right above them), around_ns.

    around_ns is what the training thread spends in FSDP2 in a mean steady step, exposed communication left out. Of the
    outermost unit the parent is itself. Raises NotMeasured where nothing names FSDP2's work.
    """
    thread = host.on_training_thread(rank)
    theirs = thread[host.is_named(thread, "FSDP::")]
    names = [_NAME.match(str(n)) for n in theirs["name"].unique()]
    units = {found[1] or "" for found in names if found}
    t = timing(rank)
    if not units or not len(t.windows):
        raise NotMeasured("no work of FSDP2's was traced")
    spent = iv.intersect(iv.merge(t.windows), iv.subtract(host.cover(theirs), breakdown.exposed_communication(rank)))
    # The traced steps are longer than the others, this part of them alike.
    traced = iv.total(iv.merge(t.windows)) / len(t.windows)
    around = iv.total(spent) / len(t.windows) * t.step_ns / traced
    parents = {unit.rpartition(".")[0] for unit in units}
    return pd.DataFrame({"units": [len(units)], "parents": [len(parents)], "around_ns": [around]})
