"""Files that lie beside traces, are known, and hold nothing that a report is made of: each with what to use instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from dlprof.read.formats import WHOLE, Format, Head, Part


def _json(*patterns: str) -> Callable[[Head], Sequence[Part]]:
    """Return a recogniser of JSON files with all of these expressions in the head."""
    compiled = [re.compile(pattern) for pattern in patterns]

    def recognise(head: Head) -> Sequence[Part]:
        is_json = head.opens in ("{", "[")
        return WHOLE if is_json and all(one.search(head.text) for one in compiled) else ()

    return recognise


# A packet, its length, and a field that packets begin with: times, processes, events, sequences, tracks, config.
_PACKET = re.compile(rb"\n[\x80-\xff]{0,3}[\x01-\x7f](?:[\x12\x18\x32\x40\x50\x5a\x62\x68]|[\x80-\xff][\x02-\x05])")


# A plane of a host, a device or the compiler's modules: its number, if any, and its name.
_PLANE = re.compile(
    rb"\n[\x80-\xff]{0,4}[\x01-\x7f](?:\x08[\x80-\xff]{0,9}[\x00-\x7f])?\x12[\x05-\x7f]/(?:host|device|task)[:-]"
)


FORMAT = (
    Format(
        name="memory_timeline",
        title="memory timeline of torch.profiler",
        recognised="JSON that is lists of numbers: times and sizes, or an action, its bytes and their category",
        recognise=_json(r"^\s*\[\s*\[\s*-?\d+(?:\.\d+)?(?:\s*,\s*-?\d+(?:\.\d+)?){3,}\s*[\],]"),
        left="it has no step's times: `torch.cuda.memory._dump_snapshot()` writes what dlprof reads of memory, and"
        " torch.profiler's trace shows the steps",
        record="prof.export_memory_timeline('memory.json')",
    ),
    Format(
        name="autograd_profile",
        title="profile of torch.autograd.profiler, before torch 1.8",
        recognised="JSON whose events are of the processes `CPU functions` and `CUDA functions`",
        recognise=_json(r'"pid"\s*:\s*"(?:CPU|CUDA) functions"'),
        left="its kernels have no streams and no launches: record the steps with torch.profiler (torch 1.8.1 or later)",
        record="torch.autograd.profiler.profile()",
        seen=False,
    ),
    Format(
        name="xspace",
        title="XSpace of JAX, XLA or TensorFlow (`.xplane.pb`)",
        recognised="protobuf that begins with a plane named `/host:…` or `/device:…`",
        recognise=lambda head: WHOLE if _PLANE.match(head.start) else (),
        left="dlprof reads traces of PyTorch jobs; XProf (`xprof --logdir DIR`) shows this one, and PyTorch/XLA writes"
        " it, too",
    ),
    Format(
        name="execution_trace",
        title="execution trace (PyTorch ET or Chakra)",
        recognised="JSON with `schema`, `nodes` and operators' `inputs`, and no `traceEvents`",
        recognise=_json(
            r'^\s*\{[^\[]{0,2000}"schema"\s*:\s*"[\d.]+(?:-chakra[\w.-]*)?"',
            r'"nodes"\s*:\s*\[(?![\s\S]*"traceEvents")',
        ),
        left="it holds operators and tensors, and no times of a device: read torch.profiler's trace of the same steps",
        record="torch.profiler.ExecutionTraceObserver()",
        seen=False,
    ),
    Format(
        name="dlprof_export",
        title="trace that `dlprof export` wrote",
        recognised="a Chrome trace whose `otherData` names dlprof as its exporter",
        recognise=_json(r'"otherData"\s*:\s*\{[^{}]{0,400}"exporter"\s*:\s*"dlprof '),
        left="it is a reduced picture of a run: open the run, or the traces that it was made of",
        record="dlprof export PATH --perfetto FILE",
    ),
    Format(
        name="dlprof_result",
        title="result of a report",
        recognised="JSON with `format`, `saving` and `outcomes`",
        recognise=_json(r'^\s*\{\s*"format"\s*:\s*\d', r'"saving"\s*:\s*"Saving'),
        left="it is what a report says: `dlprof compare` reads it",
        record="dlprof report PATH",
    ),
    Format(
        name="perfetto",
        title="Perfetto trace",
        recognised="protobuf that begins with a packet of a trace",
        recognise=lambda head: WHOLE if not head.is_text and _PACKET.match(head.start) else (),
        left="have its tool write another format (rocprofv3: `--output-format rocpd`), or make JSON of it:"
        " `traceconv json FILE FILE.json`",
        seen=False,
    ),
)
