"""How much each module computes: the FLOPs of its matrix products, by the shapes in the trace."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis.compute.products import products
from dlprof.analysis.engine import within_rank
from dlprof.analysis.modules.frames import Frames
from dlprof.analysis.modules.sums import Sums, sums
from dlprof.errors import NotMeasured


@within_rank
def module_flops(
    operator_work: pd.DataFrame, spans: pd.DataFrame, module_rows: pd.DataFrame, module_frames: Frames
) -> Sums:
    """Return the FLOPs of each module's operators in the traced steps; raise NotMeasured where no shape is known."""
    owners = operator_work["owner"].to_numpy()
    rows = np.unique(owners[owners >= 0])
    keys = [spans[column].cat.codes.to_numpy()[rows].astype(np.int64) for column in ("name", "shape", "dtype")]
    each, of = np.unique(np.column_stack(keys), axis=0, return_inverse=True)
    texts = [spans[column].cat.categories for column in ("name", "shape", "dtype")]
    told = [[str(text[code]) for text, code in zip(texts, row, strict=True)] for row in each.tolist()]
    flops = np.array([products(*one)[0] if one[1] else np.nan for one in told])
    if np.isnan(flops).all():
        raise NotMeasured("the trace has no shapes of operators (record_shapes=True)")
    found = np.nan_to_num(flops)[of.reshape(-1)]
    module, part = module_rows["module"].to_numpy()[rows], module_rows["part"].cat.codes.to_numpy()[rows]
    return sums(module_frames, module, part, found)
