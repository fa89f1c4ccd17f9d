"""A rank's peak memory by part, now and with a change: pure functions of counted bytes.

The backward pass is computed module by module: the earlier modules' activations still exist, and the later modules'
gradients already exist, so the peak may be at any module, or in the optimizer's step. A change at one moment may make
another moment the peak. The functions do not depend on the kind of model: they scale, split or move counted bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import ceil, inf

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from dlprof.analysis.compute.products import WIDTH

# Parts of memory, as in `memory_composition`, in the order of the bars.
PARTS = (
    "parameter",
    "cast",
    "gradient",
    "optimizer",
    "buffer",
    "activation",
    "input",
    "communication",
    "temporary",
    "cache",
    "libraries",
    "process",
    "unexplained",
)

# The parts that grow with the batch. Temporary memory also grows, except the optimizer's.
GROWING = ("activation", "input", "temporary")

# The parts that exist only at some moments of a step.
_PASSING = ("cast", "gradient", "activation", "temporary")

# Under autocast these compute in float32, and so do the activations that they save (torch.amp, "CUDA Ops that can
# autocast to float32"): norms, losses and softmax. Activations saved outside any module are the loss's.
_STAY_FLOAT32 = ("Norm", "Loss", "Softmax", "Softplus", "Embedding")

# Modules that may save as many elements as scores have, and no scores.
_NO_SCORES = ("Linear", "LayerNorm", "RMSNorm", "GELU", "ReLU", "SiLU", "Embedding", "Conv1d", "Conv2d")

# bitsandbytes and torchao keep a float32 scale for each block of 256 values (Dettmers et al., 8-bit Optimizers via
# Block-wise Quantization, ICLR 2022).
_BLOCK = 256


class Footprint(Struct, frozen=True, dict=True):
    """One rank's memory, from its table `held`.

    `always`: part → bytes at every moment. `places`: the tensors that the forward pass saves, a row for each size of
    tensor that a module saves, in that order, bytes: kept (until its backward pass), again (recomputed by the
    checkpoint `unit` for the backward passes within it), cast, gradient (left by its backward pass), own (the part of
    the gradient that exists while the whole row still does), flowing (temporary).
    """

    held: pd.DataFrame
    always: Mapping[str, float]
    places: pd.DataFrame
    gradient: float  # bytes of gradients before the backward pass
    stepping: float  # temporary bytes as the optimizer steps
    gathered: float = 0.0  # parameters of one unit of FSDP, whole

    @cached_property
    def moments(self) -> Mapping[str, Mapping[str, float]]:
        """Moment → part → bytes: "forward", at the end of the forward pass; the places of the backward pass that may be
        the peak, "backward 12"; "update", as the optimizer steps.
        """
        kept, cast, flowing, made = self._walk()
        rows = self.places[["kept", "cast"]].sum()
        found = {"forward": self._parts(rows["kept"], rows["cast"], self.gradient, 0.0, 2)}
        # All growing parts scale by one factor, so only the corners of growing against constant bytes can be the peak.
        for at in corners(kept + flowing, cast + made):
            found[f"backward {at}"] = self._parts(kept[at], cast[at], made[at], flowing[at], 3)
        whole = max(float(self.places["gradient"].sum()), self.gradient)
        return found | {"update": self._parts(0.0, 0.0, whole, self.stepping, 0)}

    def _walk(self) -> tuple[NDArray[np.float64], ...]:
        """Return the memory in the backward pass of each place: activations, casts, temporary memory, gradients."""
        p = self.places
        again = p.groupby("unit", sort=False)["again"].cumsum().to_numpy()
        kept, cast = p["kept"].cumsum().to_numpy() + again, p["cast"].cumsum().to_numpy()
        behind = p["gradient"].sum() - p["gradient"].cumsum().to_numpy()
        return kept, cast, p["flowing"].to_numpy(), np.maximum(behind + p["own"].to_numpy(), self.gradient)

    def _parts(self, kept: float, cast: float, gradient: float, temporary: float, units: int) -> dict[str, float]:
        parts = {**dict.fromkeys(PARTS, 0.0), **self.always}
        parts["communication"] += units * self.gathered
        return parts | {"activation": kept, "cast": cast, "gradient": gradient, "temporary": temporary}

    @property
    def parts(self) -> Mapping[str, float]:
        """The parts at the peak."""
        return max(self.moments.values(), key=lambda parts: sum(parts.values()))

    @property
    def peak_bytes(self) -> float:
        """The peak."""
        return sum(self.parts.values())

    def scaled(self, factors: Mapping[str, float]) -> Footprint:
        """Return the same with some parts scaled; the temporary memory of the optimizer's step stays."""
        always = {part: n * factors.get(part, 1.0) for part, n in self.always.items()}
        gradient = factors.get("gradient", 1.0)
        return replace(self, always=always, gradient=self.gradient * gradient).with_rows(
            saved=factors.get("activation", 1.0),
            flowing=factors.get("temporary", 1.0),
            gradient=gradient,
            cast=factors.get("cast", 1.0),
        )

    def with_rows(self, **factors: float | NDArray[np.float64]) -> Footprint:
        """Return the same with the columns of `places` scaled."""
        columns = {"saved": ("kept", "again"), "gradient": ("gradient", "own")}
        p = self.places
        changed = {c: p[c] * by for name, by in factors.items() for c in columns.get(name, (name,))}
        return replace(self, places=p.assign(**changed))


def footprint(
    held: pd.DataFrame, at_peak: Mapping[str, float], *, before: float = 0.0, stepping: float = 0.0
) -> Footprint:
    """Return a rank's footprint from its table `held`, its peak (`at_peak`, part → bytes), the bytes of gradients
    before its backward pass (`before`), and the optimizer's temporary bytes (`stepping`).

    The temporary memory of a module's backward pass is at most the gradients of its result and of its input: about
    twice its largest tensor. No moment exceeds the peak, which bounds it for the module and for all that are alike. If
    the peak is larger, the rest counts at the moment with the most memory.
    """
    always = {part: float(at_peak.get(part, 0.0)) for part in PARTS if part not in _PASSING}
    most = float(sum(at_peak.get(part, 0.0) for part in _PASSING))
    places = places_of(held)
    now = Footprint(held, always, places, before, 0.0)
    kept, cast, _, made = now.with_rows(own=0.0)._walk()
    whole = max(float(held.loc[held["part"] == "gradient", "bytes"].sum()), now.gradient)
    least = max((kept + cast + made).max(initial=0.0), whole)
    if always["unexplained"] > 0:  # what is temporary is within that
        always["unexplained"] += most - least
        most = least
    left = np.maximum(most - kept - cast - made, 0.0)
    fits = places.assign(flowing=np.minimum(places["flowing"], left))
    flowing = fits.groupby(["kind", "dtype", "tensor"], sort=False)["flowing"].transform("min")
    now = replace(now, places=places.assign(flowing=flowing, own=np.minimum(places["own"], left - flowing)))
    stepping = min(stepping, max(most - whole, 0.0))
    now = replace(now, stepping=stepping)
    return _filled(now, most + sum(always.values()) - now.peak_bytes)


def _filled(now: Footprint, more: float) -> Footprint:
    """Return the same with more temporary memory at the peak, or less unexplained memory."""
    if more <= 0:
        return replace(now, always={**now.always, "unexplained": now.always["unexplained"] + more})
    most = max(now.moments, key=lambda moment: sum(now.moments[moment].values()))
    if most == "update":
        return replace(now, stepping=now.stepping + more)
    at = int(most.partition(" ")[2] or len(now.places) - 1)
    flowing = now.places["flowing"].to_numpy(dtype=float, copy=True)
    flowing[at] += more
    return replace(now, places=now.places.assign(flowing=flowing))


def main_device(memory_composition: pd.DataFrame) -> str:
    """Return the device with the most counted memory."""
    counted = memory_composition[memory_composition["known"] == "counted"]
    return str(counted.groupby("device", sort=False)["bytes"].sum().idxmax())


def of_device(
    held: pd.DataFrame, memory_composition: pd.DataFrame, device: str, facts: Mapping[str, object]
) -> Footprint:
    """Return the footprint of a rank on one device."""
    mine = memory_composition[memory_composition["device"] == device]
    sizes = {str(part): float(n) for part, n in mine.groupby("part")["bytes"].sum().items()}
    ends = bool((mine["moment"] == "gradients").any())
    own = held[held["device"] == device].reset_index(drop=True)
    known = facts.get("optimizers")
    optimizers = [one for one in known if isinstance(one, dict)] if isinstance(known, list) else []
    stepping = max((stepping_of(own, one) for one in optimizers), default=0.0)
    return footprint(own, sizes, before=0.0 if ends else sizes.get("gradient", 0.0), stepping=stepping)


def stepping_of(held: pd.DataFrame, optimizer: Mapping[str, object]) -> float:
    """Return the temporary bytes of an optimizer's step, from its facts.

    A fused kernel needs none. All tensors at once (the default on a GPU) take about the parameters' bytes (torch.optim:
    "foreach uses ~ sizeof(params) more peak memory than the for-loop version"). One after the other Adam, which keeps
    two values of each, takes the root of the second and the quotient of that, of the largest parameter.
    """
    sizes = held.groupby("part", observed=True)["bytes"].sum()
    state, of_model = float(sizes.get("optimizer", 0.0)), trained(held)
    on_gpu = bool(held["device"].astype(str).ne("cpu").any())
    if optimizer.get("fused") is True or not state:
        return 0.0
    if optimizer.get("foreach") is True or (on_gpu and optimizer.get("foreach") is None):
        return of_model
    rows = held[(held["part"] == "parameter") & (held["trainable"] == 1)]
    # One tensor of a module has almost all of its bytes: the weight, not the bias.
    largest = float((rows["bytes"] / (rows["tensors"] / 2).clip(lower=1)).max()) if len(rows) else 0.0
    return 2 * largest if state > 1.5 * of_model else 0.0


def trained(held: pd.DataFrame) -> float:
    """Return the bytes of the trainable parameters on this rank."""
    return float(held.loc[(held["part"] == "parameter") & (held["trainable"] == 1), "bytes"].sum())


# -- changes


def larger_batch(now: Footprint, times: float) -> Footprint:
    """Return the footprint with a larger batch: activations, inputs and temporary memory grow with it."""
    return now.scaled(dict.fromkeys(GROWING, times))


def most_times(now: Footprint, most_bytes: float) -> float:
    """Return the largest multiple of the batch that fits into so many bytes; 0: nothing fits."""
    return min(_times(stays, grows, most_bytes) for stays, grows in growth(now).values())


def growth(now: Footprint) -> Mapping[str, tuple[float, float]]:
    """Return moment → bytes that stay for any batch, and bytes that grow with it."""
    found = {}
    for moment, parts in now.moments.items():
        grows = sum(parts[part] for part in GROWING if moment != "update" or part != "temporary")
        found[moment] = (sum(parts.values()) - grows, grows)
    return found


def _times(stays: float, grows: float, most_bytes: float) -> float:
    left = most_bytes - stays
    return max(left, 0.0) / grows if grows else inf if left >= 0 else 0.0


def autocast(now: Footprint, scores: Mapping[int, float] | None = None) -> Footprint:
    """Return the footprint with autocast to 16 bits: float32 activations become half as large, except those of norms,
    losses and softmax. A copy of each weight in 16 bits is kept until the backward pass has used it.

    `scores`: of unfused attention, as of `fused_attention`. Softmax's result stays in float32, and the product with the
    values saves a copy of it in 16 bits.
    """
    held, p = now.held, now.places
    wide = (p["dtype"].astype(str) == "float32").to_numpy()
    weights = held[(held["part"] == "parameter") & (held["dtype"] == "float32") & (held["trainable"] == 1)]
    copied = weights[~_stays_float32(weights)]
    cast = copied.assign(bytes=copied["bytes"] / 2)
    narrow = np.where(wide & ~(_stays_float32(p) | (p["module"] == "")).to_numpy(), 0.5, 1.0)
    saved = narrow.copy()
    of_scores = _scores(p, scores or {}) & wide
    if of_scores.any():
        saved[of_scores] = 1.5 * sum((scores or {}).values()) / float(p.loc[of_scores, "kept"].sum())
        narrow[of_scores] = 1.0
    then = now.with_rows(saved=saved, flowing=narrow)
    return replace(then, places=then.places.assign(cast=p["cast"] + at_places(held, p["module"], cast)))


def _scores(places: pd.DataFrame, scores: Mapping[int, float]) -> NDArray[np.bool_]:
    """Return which places have as many elements as scores: softmax's results, masks and results of dropout."""
    elements = places["tensor"] / places["dtype"].map(WIDTH | {"bool": 1, "uint8": 1})
    return (elements.isin(list(scores)) & ~places["kind"].isin(_NO_SCORES)).to_numpy()


def _stays_float32(rows: pd.DataFrame) -> pd.Series[bool]:
    return rows["kind"].astype(str).str.contains("|".join(_STAY_FLOAT32))


def fused_attention(now: Footprint, scores: Mapping[int, float]) -> Footprint:
    """Return the footprint without the scores of attention, which a fused kernel recomputes.

    `scores`: elements of one call's scores → bytes of one copy of all of that size. What is saved in tensors of so many
    elements goes, softmax's result and dropout's mask too; where no such tensor was counted one copy of all goes.
    """
    gone = _scores(now.places, scores)
    if gone.any():
        return now.with_rows(saved=np.where(gone, 0.0, 1.0), flowing=np.where(gone, 0.0, 1.0))
    return now.scaled({"activation": _left(now.held[now.held["part"] == "activation"], sum(scores.values()))})


def in_16_bits(now: Footprint) -> Footprint:
    """Return the footprint of the model in 16 bits: every float32 tensor is half as large, the optimizer's too."""
    factors = {}
    for part, rows in now.held[now.held["part"].isin(("parameter", "gradient", "optimizer", "buffer"))].groupby(
        "part", observed=True
    ):
        wide = rows.loc[rows["dtype"].astype(str).isin(("float32", "float64"))]
        left = 2.0 / wide["dtype"].astype(str).map(WIDTH).astype(float)
        factors[str(part)] = _left(rows, float((wide["bytes"] * (1.0 - left)).sum()))
    each = np.asarray(now.places["dtype"].map({"float64": 0.25, "float32": 0.5}).fillna(1.0), dtype=np.float64)
    then = now.scaled(factors).with_rows(saved=each, flowing=each)
    return replace(then, stepping=now.stepping * factors.get("parameter", 1.0))


def checkpointed(now: Footprint, modules: Sequence[str]) -> Footprint:
    """Return the footprint with checkpointing: each of these modules saves only its input, and recomputes the rest.

    In its backward pass a module has all of its activations again (Chen et al., Training Deep Nets with Sublinear
    Memory Cost, 2016).
    """
    p = now.places
    inside = {unit: rows for unit, rows in p.groupby(unit_of(p["module"], modules), sort=False) if unit}
    if not inside:
        return now
    kept, again = p["kept"].to_numpy(dtype=float, copy=True), p["again"].to_numpy(dtype=float, copy=True)
    named = p["unit"].astype(object).to_numpy(copy=True)
    for unit, rows in inside.items():
        left = min(_input_bytes(rows, str(unit)), float(rows["kept"].sum()))
        again[rows.index] += rows["kept"]
        kept[rows.index] = 0.0
        kept[rows.index[0]], named[rows.index] = left, str(unit)
        # The first of them save the input, which is not recomputed.
        more = np.maximum(rows["kept"].cumsum().to_numpy() - left, 0.0)
        again[rows.index] = np.diff(more, prepend=0.0)
    return replace(now, places=p.assign(kept=kept, again=again, unit=named))


def sharded(now: Footprint, stage: int, ranks: int, unit_bytes: float = 0.0) -> Footprint:
    """Return the footprint of each rank with ZeRO of a stage; 3 is FSDP.

    Stage 1 divides the optimizer's state, 2 the gradients too, 3 the parameters too (Rajbhandari et al., ZeRO, 2020).
    At stage 3 two of the units that are gathered at a time (`unit_bytes`: the largest) are whole: the one that computes
    and the one that is fetched for it; in the backward pass with the gradients of one. What a data-parallel wrapper
    holds for its exchange goes with it.
    """
    factors = dict(zip(("optimizer", "gradient", "parameter")[:stage], [1 / ranks] * stage, strict=True))
    then = replace(now.scaled(factors), stepping=now.stepping / ranks)
    if stage < 3:
        return then
    return replace(then.scaled({"communication": 0.0}), gathered=unit_bytes)


def eight_bit(now: Footprint) -> Footprint:
    """Return the footprint with 8-bit optimizer state: a quarter of float32, and a scale for each block."""
    rows = now.held[now.held["part"] == "optimizer"]
    wide = float(rows.loc[rows["dtype"] == "float32", "bytes"].sum())
    return now.scaled({"optimizer": _left(rows, wide - wide / 4 * (1 + 4 / _BLOCK))})


def offloaded(now: Footprint) -> Footprint:
    """Return the footprint with the optimizer's state and step on the host (ZeRO-Offload, 2021)."""
    return replace(now.scaled({"optimizer": 0.0}), stepping=0.0)


def other_microbatches(now: Footprint, held_now: float, held_then: float) -> Footprint:
    """Return the footprint of a pipeline stage that holds another share of its batch's activations at a time.

    `held_now`, `held_then`: micro-batches held at a time ÷ micro-batches of a step.
    """
    return now.scaled({"activation": held_then / held_now})


def _left(rows: pd.DataFrame, gone: float) -> float:
    """Return the share of a part that is left without `gone` of its bytes."""
    whole = float(rows["bytes"].sum())
    return max(1 - gone / whole, 0.0) if whole else 1.0


def _input_bytes(rows: pd.DataFrame, unit: str) -> float:
    """Return about how large a module's input is, from the places inside it.

    A layer norm saves its input, which is as large as the layer's. Without a norm: a tensor that the first module
    inside saves.
    """
    norms = rows[rows["kind"].astype(str).str.contains("LayerNorm|RMSNorm")]
    if len(norms):
        return float(norms.groupby(norms["module"].astype(str))["kept"].sum().min())
    inner = rows[rows["module"].astype(str) != unit]
    return ceil(float((inner if len(inner) else rows)["tensor"].iloc[0]))


# -- the places of the backward pass

_MOST_SHARED = 1_000  # parameters of several modules that are looked at: more than any model is known to have


def places_of(held: pd.DataFrame) -> pd.DataFrame:
    """Return the places of a footprint: what is saved, in the order of the forward pass; one, if nothing is."""
    saved = held[held["part"] == "activation"].reset_index(drop=True)
    if not len(saved):
        saved = pd.DataFrame({"module": [""], "kind": "", "dtype": "", "tensors": 0, "bytes": 0})
    registered = held.loc[held["part"] == "parameter", "module"].astype(str).drop_duplicates()
    steps = saved["module"].astype(str).map({m: at for at, m in enumerate(registered)}).dropna().diff()
    if (steps < 0).sum() > (steps > 0).sum():  # older recordings have it in the order of the backward pass
        saved = saved[::-1].reset_index(drop=True)
    tensor = saved["bytes"] / saved["tensors"].clip(lower=1)
    texts = saved[["module", "kind", "dtype"]].astype(str)
    frame = texts.assign(
        unit="",
        tensor=tensor.astype(float),
        kept=saved["bytes"].astype(float),
        again=0.0,
        flowing=(2.0 * tensor).where(texts["dtype"].isin(WIDTH), 0.0),
    )
    gradients = held[held["part"] == "gradient"]
    gradient = at_places(held, frame["module"], gradients)
    own = gradient.copy()
    where, last = _where(held, frame["module"]), {name: at for at, name in enumerate(frame["module"])}
    for _, shared in held[held["part"] == "shared"].head(_MOST_SHARED).iterrows():
        # A parameter of two modules has a gradient once the later one has run backward. That of the other is made
        # beside it, and then added.
        whole = gradients[gradients["full_bytes"] >= shared["full_bytes"]].sort_values("full_bytes").head(1)
        for row in whole.itertuples():
            first, later = where.get(str(row.module), 0), last.get(str(shared["module"]), 0)
            if first < later:
                size = row.bytes * shared["full_bytes"] / max(row.full_bytes, 1)
                gradient[later] += size
                own[later] += size
                gradient[first] -= size
    return frame.assign(gradient=gradient, own=own, cast=at_places(held, frame["module"], held[held["part"] == "cast"]))


def at_places(held: pd.DataFrame, places: pd.Series, rows: pd.DataFrame) -> NDArray[np.float64]:
    """Return the bytes of rows at each place: where their module saves something first, else where the next parameters
    do; spread evenly where no module that has any saves something.
    """
    made = np.zeros(len(places))
    where = _where(held, places)
    sizes = rows.groupby(rows["module"].astype(str))["bytes"].sum()
    np.add.at(made, [where.get(str(name), 0) for name in sizes.index], sizes.to_numpy(dtype=float))
    return made


def _where(held: pd.DataFrame, places: pd.Series) -> dict[str, int]:
    """Return the place at which the backward pass of each module with parameters ends."""
    first = {str(name): at for at, name in reversed(list(enumerate(places)))}
    order = held.loc[held["part"] == "parameter", "module"].astype(str).drop_duplicates()
    at = order.map(first)
    spread = pd.Series(np.linspace(0, len(places) - 1, len(order)), order.index)
    at = at.bfill().ffill() if at.notna().any() else spread
    return dict(zip(order, at.round().astype(int), strict=True))


def corners(grows: NDArray[np.float64], stays: NDArray[np.float64]) -> list[int]:
    """Return the places, in order, where a·grows + b·stays may be at its most for positive a and b.

    The upper right of their convex hull (Andrew 1979).
    """
    order = np.lexsort((-stays, -grows))
    best = np.maximum.accumulate(np.concatenate(([-inf], stays[order][:-1])))
    chain: list[int] = []
    for at in order[stays[order] > best].tolist():
        while len(chain) > 1 and _turns(grows, stays, chain[-2], chain[-1], at) <= 0:
            chain.pop()
        chain.append(at)
    return sorted(chain)


def _turns(x: NDArray[np.float64], y: NDArray[np.float64], a: int, b: int, c: int) -> float:
    return float((x[b] - x[a]) * (y[c] - y[a]) - (y[b] - y[a]) * (x[c] - x[a]))


def units(held: pd.DataFrame) -> list[str]:
    """Return the modules that repeat, as a transformer's layers do: the outermost lists of alike modules.

    By path: what is numbered ("layers.0", "layers.1") and holds most of the activations, else most of the parameters.
    """
    paths = held["module"].astype(str)
    numbered = paths.str.extract(r"^(.+?)\.(\d+)(?:\.|$)")
    found = pd.DataFrame({"list": numbered[0], "place": numbered[1], "part": held["part"], "bytes": held["bytes"]})
    found = found.dropna(subset=["list"])
    if not len(found):
        return []
    sizes = found[found["part"] == "activation"].groupby("list")["bytes"].sum()
    if not sizes.sum():
        sizes = found.groupby("list")["bytes"].sum()
    chosen = sizes[sizes >= sizes.sum() / 20].index
    kept = found[found["list"].isin(chosen)].drop_duplicates(["list", "place"])
    return [f"{name}.{place}" for name, place in zip(kept["list"], kept["place"], strict=True)]


def with_modules_inside(held: pd.DataFrame, modules: Sequence[str]) -> list[str]:
    """Return those of some modules that have modules inside: a checkpoint around a single layer saves next to nothing,
    as the layer keeps little more than its input.
    """
    paths = held["module"].astype(str).unique()
    around = dict(zip(paths, unit_of(pd.Series(paths), modules), strict=True))
    outer = {unit for path, unit in around.items() if path != unit}
    return [module for module in modules if module in outer]


def largest_unit(held: pd.DataFrame, modules: Sequence[str]) -> float:
    """Return the bytes of the parameters of the largest module, or of what lies in none of them."""
    parameters = held[held["part"] == "parameter"]
    sizes = parameters["full_bytes"].groupby(unit_of(parameters["module"], modules).to_numpy()).sum()
    return float(sizes.max()) if len(sizes) else 0.0


def unit_of(paths: pd.Series, modules: Sequence[str]) -> pd.Series:
    """Return of each path the one of these modules that it is, or lies in; "": none."""
    known = frozenset(modules)

    def around(path: str) -> str:
        while path and path not in known:
            path = path.rpartition(".")[0]
        return path

    text = paths.astype(str)
    return text.map({path: around(path) for path in text.unique()})
