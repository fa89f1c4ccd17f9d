"""The steps of inference servers, by the ranges that vLLM and SGLang put around each: prefill, decode or both.

vLLM names a step after its scheduled requests: execute_new_2_cached_5, later execute_context_2(512)_generation_5(5),
with tokens in the brackets or, later still, the lengths of queries and keys (sq512sk512). SGLang names it after its
forward mode: step[EXTEND bs=2 toks=512], step[DECODE bs=5].
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

VLLM, SGLANG = "vLLM", "SGLang"

# What a step does: it reads prompts, or makes one token (a few, with speculation) for each request, or both at once.
PREFILL, DECODE, MIXED, OTHER = "prefill", "decode", "prefill and decode", "other"

# How the names of such ranges begin.
PREFIXES = ("execute_", "step[")

_VLLM_NEW = re.compile(r"execute_new_(\d{1,9})_cached_(\d{1,9})")
_VLLM_CONTEXT = re.compile(
    r"execute_(?:\d{1,9}_)?context_(\d{1,9})\(([^()]{0,80})\)(?:_generation_(\d{1,9})\(([^()]{0,80})\))?"
)
_SGLANG = re.compile(r"step\[(\w+) bs=(\d{1,9})(?: toks=(\d{1,12}))?[^\]]{0,80}\]")
_MODES = {
    "EXTEND": PREFILL,
    "SPLIT_PREFILL": PREFILL,
    "PREBUILT": PREFILL,
    "DECODE": DECODE,
    "TARGET_VERIFY": DECODE,
    "DRAFT_EXTEND": DECODE,
    "MIXED": MIXED,
}


class ServingStep(NamedTuple):
    """One step by its name. `tokens`: that it reads and makes, −1: not told."""

    engine: str
    phase: str
    requests: int
    tokens: int


@lru_cache(1 << 14)
def serving_step(name: str) -> ServingStep | None:
    """Return what a range says of a step of inference; None where it is another range, or a step without a request."""
    if found := _VLLM_NEW.fullmatch(name):
        new, cached = int(found[1]), int(found[2])
        return _vllm(new, cached, -1)
    if found := _VLLM_CONTEXT.fullmatch(name):
        tokens = [int(text) if text.isdecimal() else -1 for text in (found[2], found[4] or "0")]
        return _vllm(int(found[1]), int(found[3] or 0), -1 if -1 in tokens else sum(tokens))
    if found := _SGLANG.fullmatch(name):
        phase, requests = _MODES.get(found[1], OTHER), int(found[2])
        tokens_of = int(found[3]) if found[3] else requests if found[1] == "DECODE" else -1
        return ServingStep(SGLANG, phase, requests, tokens_of) if requests else None
    return None


def _vllm(prefilled: int, decoded: int, tokens: int) -> ServingStep | None:
    if not prefilled + decoded:
        return None
    phase = MIXED if prefilled and decoded else PREFILL if prefilled else DECODE
    return ServingStep(VLLM, phase, prefilled + decoded, tokens)
