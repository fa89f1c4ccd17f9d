"""The FLOPs of each module: as counted in one step, else those of its matrix products by the trace's shapes."""

from __future__ import annotations

import numpy as np

from dlprof import schema
from dlprof.analysis.compute.cpu_work import is_product
from dlprof.analysis.compute.operators import operator_work
from dlprof.analysis.compute.products import products
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, within_rank
from dlprof.analysis.modules.exchanges import nearest
from dlprof.analysis.modules.frames import BACKWARD, FORWARD, RECOMPUTE, Frames, module_frames
from dlprof.analysis.modules.rows import module_rows
from dlprof.analysis.modules.sums import Sums, sums
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.errors import NotMeasured

_COUNTED = {"forward_flops": FORWARD, "recompute_flops": RECOMPUTE, "backward_flops": BACKWARD}


@within_rank
def shaped_flops(
    operator_work: Frame = needs(operator_work),
    spans: Frame = needs(schema.SPANS),
    module_rows: Frame = needs(module_rows),
    module_frames: Frames = needs(module_frames),
) -> Sums:
    """Return the FLOPs of each module's operators in the traced steps, NaN where a product's are not known: a trace has
    no stride of a convolution, and no shape of attention. Raises NotMeasured where no shape is known.
    """
    owners = operator_work["owner"].to_numpy()
    rows = np.unique(owners[owners >= 0])
    keys = [spans[column].cat.codes.to_numpy()[rows].astype(np.int64) for column in ("name", "shape", "dtype")]
    each, of = np.unique(np.column_stack(keys), axis=0, return_inverse=True)
    texts = [spans[column].cat.categories for column in ("name", "shape", "dtype")]
    told = [[str(text[code]) for text, code in zip(texts, row, strict=True)] for row in each.tolist()]
    flops = np.array([products(*one)[0] if one[1] else np.nan for one in told])
    if np.isnan(flops).all():
        raise NotMeasured("the trace has no shapes of operators (record_shapes=True)")
    flops[np.isnan(flops) & ~np.array([is_product(operator) for operator, _, _ in told], dtype=bool)] = 0.0
    found = flops[of.reshape(-1)]
    module, part = module_rows["module"].to_numpy()[rows], module_rows["part"].cat.codes.to_numpy()[rows]
    return sums(module_frames, module, part, found)


@within_rank
def module_flops(
    modules: Maybe[Frame] = maybe(schema.MODULES),
    shaped_flops: Maybe[Sums] = maybe(shaped_flops),
    module_frames: Frames = needs(module_frames),
    timing: Timing = needs(timing),
) -> Sums:
    """Return the FLOPs of each module in the traced steps; raise NotMeasured where they are not known.

    The recorder's count of one step by module includes convolutions and attention; the shapes are those of products.
    """
    counted = modules.or_none()
    if counted is None or not (counted["forward_flops"] > 0).any():
        return shaped_flops.get()
    place = {path: n for n, path in reversed(list(enumerate(module_frames.paths)))}
    module = np.array([nearest(str(path), place) for path in counted["path"]], dtype=np.int64)
    found = np.zeros_like(sums(module_frames, module[:0], module[:0]))
    for column, part in _COUNTED.items():
        each = np.maximum(counted[column].to_numpy(), 0)
        found += sums(module_frames, module, np.full(len(module), part), each)
    return found * len(timing.windows)
