"""What must hold of a report, given what the oracle measured: one function for each kind of recording.

Each gets a recording and returns parts. They are used where it was made, and wherever it is a test's data later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import reading, timing
from benchmarks.gpu.outcome import Part, above, among, below, between, holds, near, same, skipped


@dataclass(frozen=True)
class Recording:
    """A run's folder, dlprof's result of it, and the oracle's figures."""

    folder: Path
    said: reading.Result
    oracle: Mapping[str, Any]


Judge = Callable[[Recording], list[Part]]

# GPU.md's table. Computation: points of a share. A saving and a predicted step: shares of the measured ones.
COMPUTATION_POINTS = 0.03
TRACED_TO_STEADY = (0.9, 1.1)
SAVING_SHARE = 0.15
MFU_POINTS = 0.03
TENSOR_LEAST, DRAM_LEAST = 0.6, 0.8
# What goes over the link is more than what is copied: to each 256 bytes of it PCIe adds a packet's header, framing and
# check, up to 24 bytes. On an H200 GPM said 1.07 × the copied bytes.
PCIE_TO_COPIED = (0.98, 1.10)
MATCHED_LEAST = 0.95
LATE_SHARE = 0.20
HEALTHY_MOST = 0.05
# Of a step's length nothing is asked there; two clocks of one job must agree.
STEP_SHARE = 0.03
# The step after the change that stands first, and its speed-up.
AFTER_SHARE = 0.15
# What is faster than so many times is not told in figures.
MOST_TIMES = 10.0

# What says that the device waits for the host or its data. Of a device that never does, none of them may be found.
WAITS = (
    "blocking_copy",
    "exposed_copy",
    "host_bound",
    "host_sync",
    "input_wait",
    "pageable_copy",
    "parameter_loop",
    "step_python",
)

_EVENTS = "CUDA events of the script"


def asynchronous(of: Recording) -> list[Part]:
    """Judge a job whose device is never idle, since its host runs ahead."""
    found = [rule for rule in WAITS if reading.is_found(of.said, rule)]
    return [
        _computation(of.said, of.oracle),
        holds("no host_bound", not reading.is_found(of.said, "host_bound"), "host_bound is found", how=_EVENTS),
        holds(
            "nothing says that the device waits",
            not found,
            f"found: {', '.join(found)}; the device is busy for {100 * of.oracle['busy_share']:.0f} % of the step",
            how=_EVENTS,
        ),
        between(
            "traced ÷ steady",
            reading.of_window(of.said, "overhead"),
            *TRACED_TO_STEADY,
            unit="",
            how="dlprof's own two means; beside it the events' traced step ÷ that of the plain run",
            beside=of.oracle.get("traced_to_plain"),
        ),
        near(
            "step",
            reading.step_ms(of.said),
            of.oracle["step_ms"],
            share=STEP_SHARE,
            unit="ms",
            how=f"{_EVENTS}, run without dlprof",
        ),
        *_sound(of.said),
    ]


def waiting(of: Recording) -> list[Part]:
    """Judge a job that reads its loss in every step: what that costs was measured by leaving it out."""
    names = ("host_bound", "host_sync")
    found = [rule for rule in names if reading.is_found(of.said, rule)]
    return [
        _computation(of.said, of.oracle),
        holds(
            "host_bound or host_sync", bool(found), f"neither is found, but {reading.findings(of.said) or 'nothing'}"
        ),
        near(
            "saving",
            reading.saving_ms(of.said, *names),
            of.oracle["gain_ms"],
            share=SAVING_SHARE,
            unit="ms",
            how=f"{_EVENTS}: the step less that of the same job without .item() and the Python after it",
        ),
        *_sound(of.said),
    ]


def counted(of: Recording) -> list[Part]:
    """Judge how many steps were counted; `slack` of them may be missing or too many where no loader marks them."""
    steps, slack = int(of.oracle["steps"]), int(of.oracle.get("slack", 0))
    counts = reading.steps_counted(of.folder)
    return [
        near("steps counted", counts, steps, points=slack, unit="", how="the script's own count")
        if slack
        else same("steps counted", counts, steps, how="the script's own count"),
        *_sound(of.said),
    ]


def product(of: Recording) -> list[Part]:
    """Judge a job that is nothing but products of large bf16 matrices."""
    tensor = _sampled(of.folder, of.oracle, "tensor_busy_share")
    parts = [
        near(
            "FLOPs of a step",
            reading.of_window(of.said, "flops"),
            of.oracle["flops"],
            share=0.01,
            unit="FLOP",
            how="2 n³ of each product, counted by the script",
        )
    ]
    if of.oracle.get("peak_flops"):
        parts.append(
            near(
                "MFU",
                reading.of_window(of.said, "mfu"),
                of.oracle["flops"] / (of.oracle["step_ms"] / 1e3) / of.oracle["peak_flops"],
                points=MFU_POINTS,
                unit="share",
                how="the script's FLOPs ÷ its CUDA events' step ÷ the data sheet's peak",
            )
        )
    parts.append(above("GPM's tensor cores", tensor, TENSOR_LEAST, unit="share", how="bf16 products and nothing else"))
    return [*parts, *_sound(of.said)]


def copy(of: Recording) -> list[Part]:
    """Judge a job that copies within the device's memory."""
    dram = _sampled(of.folder, of.oracle, "dram_share")
    return [
        above("GPM's memory", dram, DRAM_LEAST, unit="share", how="copies and nothing else, of each byte both ways"),
        near(
            "copying",
            reading.share(of.said, "copy"),
            of.oracle["busy_share"],
            points=COMPUTATION_POINTS,
            unit="share",
            how=_EVENTS,
        ),
        *_sound(of.said),
    ]


def upload(of: Recording) -> list[Part]:
    """Judge a job that sends pinned memory to the device."""
    copied = of.oracle["bytes_per_s"]
    received, sent = (_sampled(of.folder, of.oracle, f"pcie_{way}_bytes_per_s") for way in ("received", "sent"))
    least, most = PCIE_TO_COPIED
    return [
        between(
            "PCIe, received by the GPU",
            None if received is None else received / copied,
            least,
            most,
            unit="×",
            how="what NVML says ÷ the script's bytes ÷ its CUDA events",
        ),
        below(
            "PCIe, sent by the GPU",
            None if sent is None else sent / copied,
            0.1,
            unit="×",
            how="it sends nothing but acknowledgements and requests",
        ),
        near(
            "copying",
            reading.share(of.said, "copy"),
            of.oracle["busy_share"],
            points=COMPUTATION_POINTS,
            unit="share",
            how=_EVENTS,
        ),
        *_sound(of.said),
    ]


def tf32(of: Recording) -> list[Part]:
    """Judge what the facts say of float32 products."""
    told = multiplies_in(reading.facts(of.folder).get("matmul") or {})
    return [same(f"precision {of.oracle['precision']}", told, of.oracle["precision"], how="read back by the script")]


def fp16(of: Recording) -> list[Part]:
    """Judge what the facts say of autocast and the gradient scaler."""
    facts = reading.facts(of.folder)
    autocast = facts.get("autocast") or {}
    return [
        same("autocast", autocast.get("dtype"), "float16", how="the script's own"),
        same("GradScaler", bool(facts.get("grad_scaler")), True, how="the script's own"),
    ]


def allocator(of: Recording) -> list[Part]:
    """Judge what the facts say of the allocator's settings."""
    env = reading.facts(of.folder).get("env") or {}
    return [
        same("PYTORCH_ALLOC_CONF", env.get("PYTORCH_ALLOC_CONF"), of.oracle["alloc"], how="what it was started with")
    ]


def device(of: Recording) -> list[Part]:
    """Judge which device the facts name: the one that holds the model, current or not."""
    told = (reading.facts(of.folder).get("device") or {}).get("uuid")
    return [same("UUID", bare(told), bare(of.oracle.get("uuid")), how="the device that the script trains on")]


def late_rank(of: Recording) -> list[Part]:
    """Judge two ranks, of which the last comes late to every exchange."""
    matched = reading.matched_collectives(of.said)
    return [
        above(
            "collectives matched",
            None if matched is None else matched / float(of.oracle["collectives"]),
            MATCHED_LEAST,
            unit="share",
            how=f"the script asks for {of.oracle['collectives']} a step",
        ),
        near(
            "rank 0 waits for rank 1",
            reading.waits_ms(of.said, 0, 1),
            of.oracle["late_ms"],
            share=LATE_SHARE,
            unit="ms",
            how="the ranks' own clocks before the first collective of each step",
        ),
        *_sound(of.said),
    ]


def fault(of: Recording) -> list[Part]:
    """Judge a planted fault: its rule found, and its saving the gain of the run without it, where one was made."""
    name, rule = of.oracle["name"], of.oracle["rule"]
    one = reading.outcome(of.said, rule)
    found = one is not None and one["state"] == "found"
    why = "the result has no such rule" if one is None else f"{one['state']}: {one.get('why') or one.get('summary')}"
    parts = [holds(f"{name}: {rule}", found, why)]
    if found and one is not None and of.oracle.get("gain_ms") is not None and one["scope"] == "step":
        parts.append(
            near(
                f"{name}: gain",
                float(one["saving_ns"]) / 1e6,
                of.oracle["gain_ms"],
                share=SAVING_SHARE,
                points=STEP_SHARE * of.oracle["step_ms"],
                unit="ms",
                how="the step less that of the same script without the fault, by the lines that both print",
            )
        )
    return [*parts, *_sound(of.said)]


def healthy(of: Recording) -> list[Part]:
    """Judge a healthy run: nothing of 5 % or more may be found."""
    found = reading.findings(of.said, HEALTHY_MOST)
    return [holds(f"{of.oracle['name']}: nothing found", not found, f"found: {', '.join(found)}"), *_sound(of.said)]


def advice(of: Recording) -> list[Part]:
    """Judge the first cure of a report: the true cause, its line, the change that was measured, and the step after it.

    The oracle holds the mean step of the script, `plain_ms`, and of its fixed variant, `fixed_ms`; the `rules` of which
    one must come first (none: any), the `lines` that it must point at, and the words of which the change must have one,
    the `remedy`. `promised`: whether the change can be priced. `together`: that of all findings was measured. Where it
    gains nothing, nothing may be promised of it.
    """
    oracle, gain = of.oracle, of.oracle["plain_ms"] / of.oracle["fixed_ms"]
    told = f"{oracle['plain_ms']:.2f} → {oracle['fixed_ms']:.2f} ms ({gain:.2f} ×)"
    parts = [Part("gain", "passed", true=told, how=f"the script's own clock, {oracle['runs']} runs of each in turn")]
    if gain < 1 + HEALTHY_MOST or not oracle["remedy"]:
        return [*parts, _not_promised("cause", of), *_sound(of.said)]
    first = next(iter(reading.cures(of.said)), None)
    if first is None:
        return [*parts, holds("cause", False, "nothing is found"), *_sound(of.said)]
    change = reading.change_of(first)
    lines = reading.lines_of(first)
    line = next((n for n in lines if n in oracle["lines"]), next(iter(lines), None))
    parts += [
        among("cause", first["id"], oracle["rules"] or [first["id"]], how="the one mistake of the script"),
        among("line", line, oracle["lines"], how="marked in the script"),
        Part("change", "passed", said=change, true=oracle["change"])
        if _names(change, oracle["remedy"])
        else Part("change", "failed", f"“{change}”, where {oracle['change']} was measured", change, oracle["change"]),
    ]
    if oracle.get("together") and of.said["together"]:
        first = {**first, **of.said["together"], "error_ns": 0.0}
    return [*parts, *_after(of, first, parts[-1].state == "passed"), *_sound(of.said)]


def _after(of: Recording, first: Mapping[str, Any], is_change: bool) -> list[Part]:
    """Judge the step after the first change, where it is the one that was measured and can be priced."""
    after, fixed, how = reading.after_ms(of.said, first), of.oracle["fixed_ms"], "the fixed script's own clock"
    said, least, most = after or (None, 0.0, 0.0)
    points = STEP_SHARE * of.oracle["plain_ms"]
    times = (min(gain, MOST_TIMES) for gain in (float(first["speedup"]), of.oracle["plain_ms"] / fixed))
    parts = [
        near("step after", said, fixed, share=AFTER_SHARE, points=points, unit="ms", how=how),
        near("speed-up", *times, share=AFTER_SHARE, unit="×", how=how),
    ]
    if most > least:
        span = f"{least:.2f} to {most:.2f} ms"
        inside = holds("range", least <= fixed <= most, f"{span} is said, {fixed:.2f} ms is true", how=how)
        parts.append(replace(inside, said=span, true=fixed, unit="ms"))
    else:
        parts.append(skipped("range", "the report names no range"))
    if is_change and of.oracle["promised"]:
        return parts
    why = "nobody can know what this change gives" if is_change else "another change than the one that was measured"
    return [replace(part, state="skipped", why=why, true=None, limit="") for part in parts]


def remedied(of: Recording) -> list[Part]:
    """Judge the fixed variant of a script: what was mended is not advised again, for 5 % of the step or more."""
    return [_not_promised("fixed", of), *_sound(of.said)]


def _not_promised(name: str, of: Recording) -> Part:
    """Judge that nothing is promised of a change that gives nothing, or of a healthy script; a bound is no promise."""
    again = [
        f"{o['id']} {100 * float(o['share']):.0f} %"
        for o in reading.cures(of.said, HEALTHY_MOST)
        if not o["at_most"]
        and (_names(reading.change_of(o), of.oracle["remedy"]) or not of.oracle["remedy"])
        and o["id"] in (of.oracle["rules"] or [o["id"]])
    ]
    return holds(
        name, not again, f"{', '.join(again)}: {of.oracle['change']} gives nothing", how="the script's own clock"
    )


def _names(change: str, words: Sequence[str]) -> bool:
    return any(word.lower() in change.lower() for word in words)


# By the name that a kept recording's oracle.json has.
JUDGES: Mapping[str, Judge] = {
    one.__name__: one
    for one in (
        asynchronous,
        waiting,
        counted,
        product,
        copy,
        upload,
        tf32,
        fp16,
        allocator,
        device,
        late_rank,
        fault,
        healthy,
        advice,
        remedied,
    )
}


def multiplies_in(matmul: Mapping[str, Any]) -> str | None:
    """Return how float32 is multiplied, as the facts say it: "tf32" or "ieee"; None where they do not.

    A precision by name counts before the older switch, which says nothing once the newer API was used.
    """
    for key in ("matmul_fp32_precision", "fp32_precision", "cuda_fp32_precision"):
        named = matmul.get(key)
        if isinstance(named, Mapping):
            named = named.get("matmul", named.get("cuda"))
        if named in ("tf32", "ieee"):
            return str(named)
    switch = matmul.get("allow_tf32")
    return None if switch is None else "tf32" if switch else "ieee"


def bare(uuid: object) -> str | None:
    """Return a GPU's UUID as torch writes it, without NVML's word in front; None where there is none."""
    return None if not uuid else str(uuid).removeprefix("GPU-")


def _computation(said: reading.Result, oracle: Mapping[str, Any]) -> Part:
    return near(
        "computation",
        reading.share(said, "computation"),
        oracle["busy_share"],
        points=COMPUTATION_POINTS,
        unit="share",
        how=f"{_EVENTS}, run without dlprof",
    )


def _sound(said: reading.Result) -> list[Part]:
    """Return a part only where rules ended with an error: no recording may bring one to that."""
    broken = reading.errors(said)
    return [holds("no rule ends with an error", False, "; ".join(broken))] if broken else []


def _sampled(folder: Path, oracle: Mapping[str, Any], key: str) -> float | None:
    begin, end = oracle["at_ns"]
    return timing.middle(timing.inside(reading.samples(folder), key, "at_ns", begin, end))
