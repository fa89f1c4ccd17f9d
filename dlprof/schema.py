"""Every table: its columns, dtypes and units. Times are int64 nanoseconds on the rank's one clock (Unix time)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dlprof.errors import DlprofError

if TYPE_CHECKING:  # decoding a trace needs the names below and no pandas
    import pandas as pd

CATEGORY = "category"


class Table(dict[str, str]):
    """The columns of a table, each with its dtype, in their order."""

    def __init__(self, name: str, /, **columns: str) -> None:
        super().__init__(columns)
        self.name = name


# Something that ran, on a thread of the host or a stream of a device; in order of start, the longer first.
SPANS = Table(
    "spans",
    lane=CATEGORY,  # "host:TID" or "device:STREAM" ("device1:STREAM" on the second device of one process)
    kind=CATEGORY,  # one of KINDS
    name=CATEGORY,
    start_ns="int64",
    dur_ns="int64",  # never negative
    launch="int64",  # the same number on a launching call and on its device work; -1: none
    bytes="int64",  # of a copy, a set or a collective; -1: unknown
    copy=CATEGORY,  # HtoD, DtoH, DtoD, PtoP, HtoH, "": no copy
    memory=CATEGORY,  # host side of a copy: pageable, pinned, "": unknown
    collective=CATEGORY,  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, recv, ... "": none
    group=CATEGORY,  # process group of a collective, "": unknown
    sequence="int64",  # of a collective among those of its communicator, the same on all its ranks; -1: unknown
    communicator=CATEGORY,  # of a collective, the same on all its ranks, "": unknown
    peer="int64",  # the rank that a send goes to or a receive comes from; -1: unknown, or neither
    dtype=CATEGORY,  # of a collective's elements, or those that an operator multiplies, "": unknown
    # Of the tensors that an operator multiplies, as "64x128 128x256". Of an all-to-all, the rows that go to each rank
    # of its group and come from each, as "3,5>4,1", or the elements in all, as "640>400". "": unknown, or none.
    shape=CATEGORY,
    # Autograd's number: of a backward function; of an operator that of the function which it or the next one makes
    # (each thread counts its own). -1: unknown, none, or not read (read/kineto/autograd.py).
    autograd="int64",
    forward_thread=CATEGORY,  # of a backward function: which thread made it, as the profiler numbers them; "": none
)

# On a host lane: op, fetch (a loader's next()), runtime (CUDA or HIP calls), annotation, python, and communication
# (gloo's collectives from issue to completion, and the calls that issue collectives: c10d::*, nccl:*).
# On a device lane: kernel, communication, copy, set, sync, annotation.
KINDS = ("annotation", "communication", "copy", "fetch", "kernel", "op", "python", "runtime", "set", "sync")

# A step that the trace marks itself (ProfilerStep#n on the host, each number once), in order of time.
TRACED_STEPS = Table("traced_steps", step="int64", start_ns="int64", dur_ns="int64")

# The step log: one step of the training loop, in order of time. -1: not measured.
STEPS = Table(
    "steps",
    step="int64",  # counts every row from 0
    kind=CATEGORY,  # train, validation (no backward, no optimizer step), other
    start_ns="int64",
    dur_ns="int64",
    lead_ns="int64",  # from its start to its first forward, but for fetching
    fetch_ns="int64",  # the training thread inside next() of a loader
    forward_ns="int64",  # inside the outermost module
    backward_ns="int64",  # inside backward(), autograd.grad
    optimizer_ns="int64",  # inside the outermost optimizer step
    device_step_ns="int64",  # from the end of the step before to the end of this one, on the device's own clock
    fetches="int64",
    forwards="int64",  # calls of outermost modules
    backwards="int64",
    optimizer_steps="int64",  # with those that a GradScaler skipped
    unused_forward_ns="int64",  # of forward_ns, in passes without gradients, or after the last backward pass
    samples="int64",  # that dlprof.step() named, else those of the loaders' batches
    inputs="int64",  # first dimension of what the model got, of its first call for each backward pass
    tokens="int64",  # that dlprof.step() named, else elements of two-dimensional integer tensors among these inputs
    profiled="int64",  # 1: the profiler was preparing, recording or exporting during this step
    first="int64",  # 1: holds an epoch's first next() or its end
)

# The modules of the models, in the order of their names, as they were when the trace window closed. A module whose
# parameters are in several of DistributedDataParallel's buckets has a row for each.
MODULES = Table(
    "modules",
    path=CATEGORY,  # as in the names of the trace's ranges, "": the model itself
    kind=CATEGORY,  # its class
    parameters="int64",  # values of its own parameters, without those of the modules in it
    parameter_bytes="int64",
    bucket="int64",  # the place among the buckets, which are reduced in this order; -1: in none, or unknown
    sharded="int64",  # 1: FSDP shards it by itself
    # Of one step, by its own operators, in one of its rows; -1: not counted.
    forward_flops="int64",
    recompute_flops="int64",  # what was not kept for the backward pass
    backward_flops="int64",
    moved_bytes="int64",  # that its operators read and write, each tensor whole
)

# One call of a kernel or an operator in a graph that torch.compile made, in their order. Paths as in MODULES.
COMPILED = Table(
    "compiled",
    graph=CATEGORY,  # its key, as in the name of its range in the trace
    operator=CATEGORY,  # as in the trace; "": the end of the graph
    module=CATEGORY,  # what it is for: of several modules the one around them
    before=CATEGORY,  # the same of kernels that the trace does not show, between the call before and this one
)

# One line of a function that `--lines` named, as a role ran it; all lines of the function, in order.
LINES = Table(
    "lines",
    role=CATEGORY,  # main, worker (of a loader)
    function=CATEGORY,  # module:qualified name, as it was named
    file=CATEGORY,
    line="int64",
    hits="int64",
    dur_ns="int64",  # with what the line called
    source=CATEGORY,  # the line's text, "": unknown
)

# The work of pipeline stages within schedule.step(), in order of time; on a GPU in the device's time, put where the
# call began on the host. Every call has its row of action "schedule"; the chunks are there for some of the calls.
CHUNKS = Table(
    "chunks",
    step="int64",  # as the recorder counts them
    action=CATEGORY,  # forward, backward, input, weight (the two halves of a split backward), loss, reduce, schedule
    stage="int64",  # -1: schedule
    microbatch="int64",  # -1: schedule, reduce
    start_ns="int64",
    dur_ns="int64",
    busy_ns="int64",  # of a schedule: its chunks together, -1: any other
)

# What held up the training thread for a millisecond or more and shows in no trace, in order of time. A row stands for
# `count` of its kind: 1, but for collections of garbage of a job that had very many; dur_ns is their sum.
STALLS = Table(
    "stalls",
    kind=CATEGORY,  # garbage_collection, checkpoint, compilation
    start_ns="int64",
    dur_ns="int64",
    step="int64",  # as the recorder counts them
    generation="int64",  # that the garbage collector went through, -1: no such stall
    path=CATEGORY,  # of a checkpoint, "": not a named file; of a compilation, the function
    phase=CATEGORY,  # that it happened in: fetch, forward, backward, optimizer, rest
    reason=CATEGORY,  # why a function was compiled anew, "": was not
    count="int64",
)

# What the training thread waited for in its loaders, and what made the batches, each in order of time. A row stands for
# `count` of its kind, and what is measured is their sum. -1: not measured.
LOADING = Table(
    "loading",
    # start: iter() of a loader. first: its first next(), in which workers start and fetch; batch: each further one.
    # end: workers leave. fetch: a worker makes a batch. usage: nothing of a loader's, but what the process used.
    kind=CATEGORY,
    start_ns="int64",
    dur_ns="int64",  # that the training thread was in the call; of a fetch, reading the samples and collating them
    count="int64",
    step="int64",  # that a batch begins, as the recorder counts them
    loader="int64",  # its place among the facts' loaders, -1: not known
    worker="int64",  # that the batch was due from, or that fetched it; -1: there is none, or unknown
    pid="int64",  # of a fetch, the worker's
    workers=CATEGORY,  # process ids of those that an epoch started with, "": there are none
    empty="int64",  # how often no batch was ready when asked for, -1: no queue
    ready="int64",  # batches that were ready when asked
    outstanding="int64",  # batches that workers were to fetch
    # CPU time of the whole process; of a fetch, the worker's since its batch before; of a batch that the training
    # thread fetches itself, that thread's.
    cpu_ns="int64",
    delay_ns="int64",  # that the training thread, or the worker, was ready to run and had no core
    thread_ns="int64",  # CPU time of the training thread alone
    pin_ns="int64",  # CPU time of the thread that pins a loader's batches
    # Of a fetch, and of a batch that the training thread fetches itself:
    collate_ns="int64",
    stored_bytes="int64",  # that came from storage
    read_bytes="int64",  # that were read at all: from files, from memory's copies of them, and through pipes
    tensors="int64",  # that the batch is made of, and
    tensor_bytes="int64",  # that they hold
)

# What gradient scalers (torch.amp.GradScaler) did, in order of time. A row stands for `count` of its kind, the last of
# which it describes.
LOSS_SCALE = Table(
    "loss_scale",
    at_ns="int64",
    step="int64",  # as the recorder counts them
    # began: its first step; skipped: gradients overflowed, and the optimizer did not step; grown: after enough steps
    # without; set: by the script; unknown: from here on the device decides what is skipped, and no host knows
    kind=CATEGORY,
    scaler="int64",  # numbered as they were made
    scale="float64",  # afterwards; NaN: not known
    interval="int64",  # steps after which the scale grows, where it began; -1: elsewhere
    count="int64",
)

# What PyTorch's CUDA allocator held on the device that the rank trains on, a few rows a second. -1: unknown.
MEMORY = Table(
    "memory",
    at_ns="int64",
    step="int64",  # the one that had just ended
    device="int64",
    allocated_bytes="int64",  # by tensors
    reserved_bytes="int64",  # taken from the device
    peak_allocated_bytes="int64",  # since the script reset it
    peak_reserved_bytes="int64",
    retries="int64",  # so far: allocations that succeeded only after the cache was emptied
    ooms="int64",  # so far: allocations that failed
    device_allocs="int64",  # so far: cudaMalloc and its like
    device_frees="int64",
)

# What a rank's memory was made of in one step, each storage once. Of a storage that several tensors share, each row has
# its own tensors' bytes. Gradients are those after the backward pass, activations at their most.
HELD = Table(
    "held",
    # parameter, cast (copies of parameters that autocast made), gradient, optimizer (its state and master copies),
    # buffer, activation (kept for the backward pass), input (of the model), communication (buckets of
    # DistributedDataParallel that are no gradients themselves, parameters that FSDP has gathered), shared (no bytes:
    # parameters that were counted for another module, and are this one's too)
    part=CATEGORY,
    module=CATEGORY,  # its path in the script's model, "": the model itself, or none is known
    kind=CATEGORY,  # the module's class, "": none is known
    device=CATEGORY,  # that holds them: cpu, cuda:0
    dtype=CATEGORY,  # float32
    tensors="int64",
    bytes="int64",  # that this rank holds
    full_bytes="int64",  # before they were sharded; of what is shared its own
    trainable="int64",  # 1: of parameters that require a gradient; 0: any other
)

# What PyTorch's CUDA allocator did, of a snapshot; in order, each device by itself. -1 and "": unknown.
MEMORY_EVENTS = Table(
    "memory_events",
    device="int64",
    at_ns="int64",
    # alloc, free_requested (by the script), free_completed (usable again), segment_alloc, segment_free, segment_map,
    # segment_unmap (memory from the device, and back), oom (there was none), snapshot
    action=CATEGORY,
    address="int64",  # -1: of an oom
    bytes="int64",
    stream="int64",
    pool=CATEGORY,  # id of the memory pool, "": the default one
    site=CATEGORY,  # the user's line, as "function (file:line)"; without one see dlprof/read/dumps/frames.py
    via=CATEGORY,  # what that line called in PyTorch or a library
    category=CATEGORY,
    free_bytes="int64",  # that the device had left, of an oom
)

# The blocks of PyTorch's CUDA allocator when a snapshot was taken; a segment is what it got from the device at once.
MEMORY_BLOCKS = Table(
    "memory_blocks",
    device="int64",
    segment="int64",  # its address
    segment_bytes="int64",
    stream="int64",
    pool=CATEGORY,
    expandable="int64",  # 1: the segment can grow
    address="int64",
    bytes="int64",
    requested_bytes="int64",  # before rounding
    state=CATEGORY,  # active_allocated, active_awaiting_free (another stream still uses it), inactive
    site=CATEGORY,  # as in MEMORY_EVENTS
    via=CATEGORY,
)

# What PyTorch's flight recorder kept of a rank's collectives, in the order in which they were issued. -1, "": unknown.
RECORDER_CALLS = Table(
    "recorder_calls",
    record="int64",
    group=CATEGORY,  # the process group's name, as PyTorch numbers them
    about=CATEGORY,  # its description, "": none
    kind=CATEGORY,  # collective, p2p
    sequence="int64",  # of the call among those of its kind in its group, the same on all its ranks
    op=CATEGORY,  # all_reduce, send 0->1, ...
    backend=CATEGORY,  # nccl, gloo, ...
    state=CATEGORY,  # scheduled, started (on the device), completed
    retired="int64",  # 1: the process waits for it no more
    created_ns="int64",
    started_ns="int64",
    completed_ns="int64",
    timeout_ms="int64",
    input=CATEGORY,  # sizes of the tensors that it takes: "1000", "2x3, 4"
    output=CATEGORY,
    dtype=CATEGORY,
    site=CATEGORY,  # as in MEMORY_EVENTS
    via=CATEGORY,
)

# One reading of one metric, of what was sampled next to the rank; each metric in order of time. What grows for good
# (CPU seconds, bytes sent, page faults) stands as it was read, and may begin again at 0.
SAMPLES = Table(
    "samples",
    source=CATEGORY,  # gpu, host (on the first rank of a host), processes (the rank's own)
    metric=CATEGORY,  # with its unit: power_w, cpu_share, rss_bytes; as the sampler names it
    at_ns="int64",
    value="float64",  # never NaN: what was not measured has no row
)

# One distinct Python stack and how often it was seen, at equal distances in time.
STACKS = Table(
    "stacks",
    role=CATEGORY,  # main (thread of the rank), thread (another of its), worker (a loader's), other (process)
    thread=CATEGORY,  # its name
    phase=CATEGORY,  # of the step, on main: fetch, forward, backward, optimizer, rest; "" elsewhere
    stack=CATEGORY,  # "name (file:line)" from the outermost on, joined by ";"
    samples="int64",  # how often, or of another tool what its weights add up to, in its unit
    profile=CATEGORY,  # the file of another tool that it is of, "": what dlprof saw while training
    unit=CATEGORY,  # samples, ns, bytes
)

# A function as a deterministic profiler counts it.
FUNCTIONS = Table(
    "functions",
    profile=CATEGORY,  # the file that it is of
    function=CATEGORY,
    file=CATEGORY,
    line="int64",  # where it begins
    calls="int64",
    own_ns="int64",
    total_ns="int64",  # with what it called
)

# What a setting that `--set` overrides did: a row for each place of the script where it took effect, one row where none
# is known.
OVERRIDES = Table(
    "overrides",
    name=CATEGORY,  # as the command line has it: loader.num_workers
    value=CATEGORY,
    before=CATEGORY,  # what the script had there; several values are joined by ", "
    applied="int64",  # how often it took effect, at all places; 0: never
    file=CATEGORY,  # "": no place is known
    line="int64",  # -1: no place is known
    function=CATEGORY,
    error=CATEGORY,  # why it did not take effect, or not everywhere; "": nothing failed
)

TABLES: Mapping[str, Table] = {
    table.name: table
    for table in (
        CHUNKS,
        COMPILED,
        FUNCTIONS,
        HELD,
        LINES,
        LOADING,
        LOSS_SCALE,
        MEMORY,
        MEMORY_BLOCKS,
        MEMORY_EVENTS,
        MODULES,
        OVERRIDES,
        RECORDER_CALLS,
        SAMPLES,
        SPANS,
        STACKS,
        STALLS,
        STEPS,
        TRACED_STEPS,
    )
}


def check(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame back if it is a table of that name, column for column; raise DlprofError where it is not."""
    columns = TABLES[name]
    if list(frame.columns) != list(columns):
        raise DlprofError(f"table {name}: columns are {list(frame.columns)}, not {list(columns)}")
    dtypes = frame.dtypes
    wrong = [c for c, dtype in columns.items() if str(dtypes[c]) != dtype]
    if wrong:
        raise DlprofError(f"table {name}: {wrong[0]} is {dtypes[wrong[0]]}, not {columns[wrong[0]]}")
    return frame


def join(name: str, parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return one table of the rows of several, in their order."""
    import pandas as pd
    from pandas.api.types import union_categoricals

    parts = [part for part in parts if len(part)] or parts[:1]  # the categories of none have no type
    columns = {
        c: union_categoricals([part[c] for part in parts])
        if dtype == CATEGORY
        else np.concatenate([part[c].to_numpy() for part in parts])
        for c, dtype in TABLES[name].items()
    }
    return check(name, pd.DataFrame(columns))


def empty(name: str) -> pd.DataFrame:
    """Return a table of no rows."""
    import pandas as pd

    return pd.DataFrame({c: pd.Series([], dtype=dtype) for c, dtype in TABLES[name].items()})
