"""A rank's peak memory by part, and what a change makes of it: pure functions of counted bytes.

Memory may peak at two moments of a step: at the end of the forward pass, with all activations, and in the optimizer's
step, with all gradients. A change that lowers one may leave the other as the peak, so both are kept. Nothing here
depends on the kind of model: counted bytes are scaled, divided or moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

import pandas as pd

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

# Parts that grow with the batch; temporary memory at the end of the forward pass, where most of it is the loss's.
GROWING = ("activation", "input", "temporary")

# Parts that exist at every moment of a step.
_ALWAYS = tuple(part for part in PARTS if part not in ("cast", "gradient", "activation", "temporary"))

WIDTH = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

# Under autocast these compute in float32, and so do the activations that they save (torch.amp, "CUDA Ops that can
# autocast to float32"): norms, losses and softmax. Activations saved outside any module are the loss's.
_STAY_FLOAT32 = ("Norm", "Loss", "Softmax", "Softplus", "Embedding")

# bitsandbytes and torchao keep a float32 scale for each block of 256 values (Dettmers et al., 8-bit Optimizers via
# Block-wise Quantization, ICLR 2022).
_BLOCK = 256


@dataclass(frozen=True)
class Footprint:
    """One rank's memory, moment → part → bytes; `held`: the rank's table of that name.

    Moments: "forward", at the end of the forward pass; "update", in the optimizer's step; and with checkpointing
    "backward" and "backward_end", while a module is recomputed.
    """

    moments: Mapping[str, Mapping[str, float]]
    held: pd.DataFrame

    @property
    def parts(self) -> Mapping[str, float]:
        """The parts at the peak."""
        return max(self.moments.values(), key=lambda parts: sum(parts.values()))

    @property
    def peak_bytes(self) -> float:
        """The peak."""
        return sum(self.parts.values())

    def scaled(self, factors: Mapping[str, float]) -> Footprint:
        """Return the same with some parts multiplied by a factor."""
        moments = {m: {p: n * factors.get(p, 1.0) for p, n in of.items()} for m, of in self.moments.items()}
        return replace(self, moments=moments)

    def with_more(self, *moments: str, **more: float) -> Footprint:
        """Return the same with bytes added to some parts at these moments."""
        changed = {m: {p: n + more.get(p, 0.0) for p, n in self.moments[m].items()} for m in moments}
        return replace(self, moments={**self.moments, **changed})

    def with_most(self, moment: str, part: str, size: float) -> Footprint:
        """Return the same with one part at a moment raised to at least `size` bytes."""
        changed = {**self.moments[moment], part: max(self.moments[moment][part], size)}
        return replace(self, moments={**self.moments, moment: changed})


def footprint(held: pd.DataFrame, at_peak: Mapping[str, float], *, foreach: bool = False) -> Footprint:
    """Return a rank's footprint from its table `held` and from its parts at the peak, part → bytes.

    `foreach`: the optimizer steps all tensors at once, with temporary memory of about the parameters' size
    (torch.optim: "foreach uses ~ sizeof(params) more peak memory than the for-loop version").
    """
    counted = held.groupby("part", observed=True)["bytes"].sum().to_dict()
    forward = {part: float(at_peak.get(part, 0.0)) for part in PARTS}
    update = {part: forward[part] if part in _ALWAYS else 0.0 for part in PARTS}
    update["gradient"] = float(counted.get("gradient", 0.0))
    update["temporary"] = trained(held) if foreach and counted.get("optimizer") else 0.0
    return Footprint({"forward": forward, "update": update}, held)


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
    if ends:
        # The peak is after the backward pass; before it the activations exist, and no gradients.
        saved = held[(held["device"] == device) & (held["part"].isin(("activation", "cast")))]
        sums = saved.groupby("part", observed=True)["bytes"].sum()
        sizes |= {str(part): float(n) for part, n in sums.items()} | {"gradient": 0.0}
    optimizers = facts.get("optimizers")
    kinds = optimizers if isinstance(optimizers, list) else []
    foreach = device != "cpu" and any(o.get("fused") is not True and o.get("foreach") is not False for o in kinds)
    now = footprint(held[held["device"] == device].reset_index(drop=True), sizes, foreach=foreach)
    # Temporary memory is that of the peak. At the other moment it is not known, but not larger.
    return now.with_most("update", "temporary", sizes.get("temporary", 0.0)) if ends else now


def trained(held: pd.DataFrame) -> float:
    """Return the bytes of the trainable parameters on this rank."""
    return float(held.loc[(held["part"] == "parameter") & (held["trainable"] == 1), "bytes"].sum())


# -- changes


def larger_batch(now: Footprint, times: float) -> Footprint:
    """Return the footprint of a larger batch: activations, inputs and temporary memory grow with it."""
    grown = now.scaled(dict.fromkeys(GROWING, times))
    same = {"temporary": now.moments["update"]["temporary"]}  # the optimizer's does not grow
    return replace(grown, moments={**grown.moments, "update": {**grown.moments["update"], **same}})


def most_times(now: Footprint, most_bytes: float) -> float:
    """Return the largest batch that fits into `most_bytes`, as a multiple of the present one; 0: none does."""
    found = inf
    for moment in now.moments.values():
        grows = sum(moment[part] for part in GROWING if moment is not now.moments["update"] or part != "temporary")
        left = most_bytes - (sum(moment.values()) - grows)
        found = min(found, max(left, 0.0) / grows if grows else inf if left >= 0 else 0.0)
    return found


def autocast(now: Footprint) -> Footprint:
    """Return the footprint with autocast to 16 bits.

    Float32 activations are half as large, except those of norms, losses and softmax, and each weight has a 16-bit copy
    until the backward pass has used it.
    """
    held = now.held
    saved = _activations(held)
    stays = saved["kind"].astype(str).str.contains("|".join(_STAY_FLOAT32)) | (saved["module"].astype(str) == "")
    halved = saved[(saved["dtype"] == "float32") & ~stays]["bytes"].sum()
    left = _left(saved, halved / 2)
    weights = held[(held["part"] == "parameter") & (held["dtype"] == "float32") & (held["trainable"] == 1)]
    cast = weights[~weights["kind"].astype(str).str.contains("|".join(_STAY_FLOAT32))]["bytes"].sum() / 2
    return now.scaled({"activation": left}).with_more("forward", cast=float(cast))


def fused_attention(now: Footprint, scores_bytes: float) -> Footprint:
    """Return the footprint without `scores_bytes` of attention scores, which a fused kernel recomputes.

    It saves at least these: softmax and dropout keep up to 5 bytes a score in 16 bits (Korthikanti et al., 2022).
    """
    return now.scaled({"activation": _left(_activations(now.held), scores_bytes)})


def in_16_bits(now: Footprint) -> Footprint:
    """Return the footprint of the model in 16 bits: every float32 tensor is half as large, the optimizer's too."""
    factors = {}
    for part, rows in now.held.groupby("part", observed=True):
        wide = rows.loc[rows["dtype"].astype(str).isin(("float32", "float64"))]
        left = 2.0 / wide["dtype"].astype(str).map(WIDTH).astype(float)
        factors[str(part)] = _left(rows, float((wide["bytes"] * (1.0 - left)).sum()))
    return now.scaled(factors | {"temporary": factors.get("activation", 1.0)})


def checkpointed(now: Footprint, modules: Sequence[str]) -> Footprint:
    """Return the footprint with checkpointing: each of these modules saves only its input, and recomputes the rest.

    In the backward pass one module at a time has all of its activations, and the gradients of two of them: the largest
    module counts. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
    """
    saved = _activations(now.held)
    inside = {str(unit): rows for unit, rows in saved.groupby(_unit_of(saved["module"], modules), sort=False) if unit}
    whole = {module: float(rows["bytes"].sum()) for module, rows in inside.items()}
    inputs = {module: min(_input_bytes(rows, module), whole[module]) for module, rows in inside.items()}
    kept, gone = sum(inputs.values()), sum(whole.values())
    if not gone:
        return now
    again = max(inside, key=lambda module: whole[module])
    largest = float((inside[again]["bytes"] / inside[again]["tensors"].clip(lower=1)).max())
    # All inputs exist while the last module is recomputed, all gradients while the first one is.
    of_gradients = now.held[now.held["part"] == "gradient"]
    outside = float(of_gradients.loc[_unit_of(of_gradients["module"], modules) == "", "bytes"].sum())
    gradients = now.moments["update"]["gradient"]
    ends = {"backward": (kept, outside), "backward_end": (inputs[again], gradients)}
    left = now.scaled({"activation": _left(saved, gone - kept)})
    forward, counted = now.moments["forward"], float(saved["bytes"].sum())
    scale = forward["activation"] / counted
    for moment, (beside, gradient) in ends.items():
        parts = {**forward, "gradient": max(forward["gradient"], gradient), "temporary": 2 * largest * scale}
        parts["activation"] = (beside + whole[again] - inputs[again]) * scale
        left = replace(left, moments={**left.moments, moment: parts})
    return left


def sharded(now: Footprint, stage: int, ranks: int, unit_bytes: float = 0.0) -> Footprint:
    """Return the footprint of each rank with ZeRO of a stage; 3 is FSDP.

    Stage 1 divides the optimizer state, 2 also the gradients, 3 also the parameters (Rajbhandari et al., ZeRO, 2020).
    At stage 3 two units (`unit_bytes`: the largest) are gathered at a time: the one that computes and the prefetched
    one; at the end of the backward pass also the gradients of one. Buffers of a data-parallel wrapper are not needed
    any more.
    """
    factors = dict(zip(("optimizer", "gradient", "parameter")[:stage], [1 / ranks] * stage, strict=True))
    if stage < 3:
        return now.scaled(factors)
    then = now.scaled({**factors, "communication": 0.0}).with_more("forward", communication=2 * unit_bytes)
    reduced = {**then.moments["update"], "communication": 3 * unit_bytes, "temporary": 0.0}
    return replace(then, moments={**then.moments, "reduce": reduced})


def eight_bit(now: Footprint) -> Footprint:
    """Return the footprint with 8-bit optimizer state: a quarter of float32, and a scale for each block."""
    rows = now.held[now.held["part"] == "optimizer"]
    wide = float(rows.loc[rows["dtype"] == "float32", "bytes"].sum())
    return now.scaled({"optimizer": _left(rows, wide - wide / 4 * (1 + 4 / _BLOCK))})


def one_moment(now: Footprint) -> Footprint:
    """Return the footprint of SGD with momentum: its state is as large as the trainable parameters."""
    rows = now.held[now.held["part"] == "optimizer"]
    return now.scaled({"optimizer": _left(rows, float(rows["bytes"].sum()) - trained(now.held))})


def offloaded(now: Footprint) -> Footprint:
    """Return the footprint with the optimizer state, and its step, on the host (ZeRO-Offload, 2021)."""
    return now.scaled({"optimizer": 0.0})


def other_microbatches(now: Footprint, held_now: float, held_then: float) -> Footprint:
    """Return the footprint of a pipeline stage that holds another share of its batch's activations at a time.

    `held_now`, `held_then`: micro-batches held at a time ÷ micro-batches of a step.
    """
    return now.scaled({"activation": held_then / held_now})


# -- from tables


def units(held: pd.DataFrame) -> list[str]:
    """Return the modules that repeat, such as a transformer's layers: the outermost lists of modules.

    By path: numbered modules ("layers.0", "layers.1") with most of the activations, else with most of the parameters.
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
    around = dict(zip(paths, _unit_of(pd.Series(paths), modules), strict=True))
    outer = {unit for path, unit in around.items() if path != unit}
    return [module for module in modules if module in outer]


def largest_unit(held: pd.DataFrame, modules: Sequence[str]) -> float:
    """Return the parameter bytes of the largest of these modules, or of all parameters outside them if that is more."""
    parameters = held[held["part"] == "parameter"]
    sizes = parameters["full_bytes"].groupby(_unit_of(parameters["module"], modules).to_numpy()).sum()
    return float(sizes.max()) if len(sizes) else 0.0


def _activations(held: pd.DataFrame) -> pd.DataFrame:
    return held[held["part"] == "activation"]


def _unit_of(paths: pd.Series, modules: Sequence[str]) -> pd.Series:
    """Return for each path the one of these modules that it is or lies in; "": none."""
    known = frozenset(modules)

    def around(path: str) -> str:
        while path and path not in known:
            path = path.rpartition(".")[0]
        return path

    text = paths.astype(str)
    return text.map({path: around(path) for path in text.unique()})


def _left(rows: pd.DataFrame, gone: float) -> float:
    """Return the share of a part that is left without `gone` of its bytes."""
    whole = float(rows["bytes"].sum())
    return max(1 - gone / whole, 0.0) if whole else 1.0


def _input_bytes(rows: pd.DataFrame, unit: str) -> float:
    """Return the estimated size of a module's input, from the activations inside it.

    A layer norm saves its input, which is as large as the layer's. Without a norm: a tensor that the first module
    inside saves.
    """
    norms = rows[rows["kind"].astype(str).str.contains("LayerNorm|RMSNorm")]
    if len(norms):
        return float(norms.groupby(norms["module"].astype(str))["bytes"].sum().min())
    inner = rows[rows["module"].astype(str) != unit]
    first = (inner if len(inner) else rows).iloc[:1]
    return ceil(float(first["bytes"].sum()) / max(int(first["tensors"].sum()), 1))
