"""Every table: its columns, dtypes and units. Times are int64 nanoseconds of Unix time, on the rank's one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dlprof.errors import DlprofError

if TYPE_CHECKING:  # decoding a trace needs the names below, but no pandas
    import pandas as pd

CATEGORY = "category"


class Table(dict[str, str]):
    """The columns of a table, each with its dtype, in their order."""

    def __init__(self, name: str, /, **columns: str) -> None:
        super().__init__(columns)
        self.name = name


# What ran on a thread of the host or a stream of a device. In order of start, the longer first.
SPANS = Table(
    "spans",
    lane=CATEGORY,  # "host:TID" or "device:STREAM" ("device1:STREAM" on the second device of one process)
    kind=CATEGORY,  # one of KINDS
    name=CATEGORY,
    start_ns="int64",
    dur_ns="int64",  # never negative
    launch="int64",  # the same number on a call and on the device work that it launched; -1: none
    bytes="int64",  # of a copy, a set or a collective; -1: unknown
    copy=CATEGORY,  # HtoD, DtoH, DtoD, PtoP, HtoH, "": no copy
    memory=CATEGORY,  # host side of a copy: pageable, pinned, "": unknown
    collective=CATEGORY,  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, recv, ... "": none
    group=CATEGORY,  # process group of a collective, "": unknown
    sequence="int64",  # number of a collective within its communicator, the same on all its ranks; -1: unknown
    communicator=CATEGORY,  # of a collective; the same on all its ranks; "": unknown
    peer="int64",  # the other rank of a send or receive; -1: unknown, or neither
    dtype=CATEGORY,  # element type of a collective, or of what an operator multiplies; "": unknown
    # Shapes of the tensors that an operator multiplies: "64x128 128x256". For an all-to-all, the rows sent to each rank
    # of its group and received from each: "3,5>4,1", or the total elements: "640>400". "": unknown, or none.
    shape=CATEGORY,
    # Autograd's sequence number, counted per thread. A backward function has its own; an operator has that of the
    # function that it or the next operator makes. -1: unknown, none, or not read (read/kineto/event_columns.py).
    autograd="int64",
    forward_thread=CATEGORY,  # thread that made a backward function, as the profiler numbers them; "": none
)

# On a host lane: op, fetch (a loader's next()), runtime (CUDA or HIP calls), annotation, python, and communication
# (gloo's collectives from issue to completion, and the calls that issue collectives: c10d::*, nccl:*).
# On a device lane: kernel, communication, copy, set, sync, annotation.
KINDS = ("annotation", "communication", "copy", "fetch", "kernel", "op", "python", "runtime", "set", "sync")

# Steps that the trace marks (ProfilerStep#n on the host, each number once), in order of time.
TRACED_STEPS = Table("traced_steps", step="int64", start_ns="int64", dur_ns="int64")

# The step log: one step of the training loop, in order of time. -1: not measured.
STEPS = Table(
    "steps",
    step="int64",  # counts every row from 0
    kind=CATEGORY,  # train, validation (no backward, no optimizer step), other
    start_ns="int64",
    dur_ns="int64",
    lead_ns="int64",  # from its start to its first forward, without fetching
    fetch_ns="int64",  # the training thread inside next() of a loader
    forward_ns="int64",  # inside the outermost module
    backward_ns="int64",  # inside backward(), autograd.grad
    optimizer_ns="int64",  # inside the outermost optimizer step
    device_step_ns="int64",  # from the end of the previous step to the end of this one, on the device's clock
    fetches="int64",
    forwards="int64",  # calls of outermost modules
    backwards="int64",
    optimizer_steps="int64",  # includes those that a GradScaler skipped
    unused_forward_ns="int64",  # part of forward_ns in passes without gradients, or after the last backward pass
    samples="int64",  # as passed to dlprof.step(), else those of the loaders' batches
    inputs="int64",  # first dimension of the model's input, in its first call for each backward pass
    tokens="int64",  # as passed to dlprof.step(), else elements of two-dimensional integer tensors among these inputs
    profiled="int64",  # 1: the profiler was preparing, recording or exporting during this step
    first="int64",  # 1: contains an epoch's first next() or its end
)

# The modules of the models when the trace window closed, in order of their names. A module with parameters in several
# of DistributedDataParallel's buckets has a row for each bucket.
MODULES = Table(
    "modules",
    path=CATEGORY,  # as in the names of the trace's ranges, "": the model itself
    kind=CATEGORY,  # its class
    parameters="int64",  # values of its own parameters, without those of its submodules
    parameter_bytes="int64",
    bucket="int64",  # index of the bucket, in order of reduction; -1: none, or unknown
    sharded="int64",  # 1: FSDP shards it by itself
    # Per step, by its own operators; only in one of its rows. -1: not counted.
    forward_flops="int64",
    recompute_flops="int64",  # forward work repeated for the backward pass
    backward_flops="int64",
    moved_bytes="int64",  # read and written by its operators, counting whole tensors
)

# The calls of kernels and operators in graphs of torch.compile, in their order. Module paths as in MODULES.
COMPILED = Table(
    "compiled",
    graph=CATEGORY,  # its key, as in the name of its range in the trace
    operator=CATEGORY,  # as in the trace; "": the end of the graph
    module=CATEGORY,  # the module that it belongs to; for several modules, the one that contains them
    before=CATEGORY,  # as `module`, for kernels since the previous call that the trace does not show
)

# The lines of the functions given to `--lines`, in order, for each role that ran them.
LINES = Table(
    "lines",
    role=CATEGORY,  # main, worker (of a loader)
    function=CATEGORY,  # module:qualified name, as given to `--lines`
    file=CATEGORY,
    line="int64",
    hits="int64",
    dur_ns="int64",  # includes what the line called
    source=CATEGORY,  # the line's text, "": unknown
)

# The work of pipeline stages within schedule.step(), in order of time. On a GPU, durations are the device's, from the
# call on the host on. Every call has a row of action "schedule"; only some calls have rows for their chunks.
CHUNKS = Table(
    "chunks",
    step="int64",  # as the recorder counts them
    action=CATEGORY,  # forward, backward, input, weight (the two halves of a split backward), loss, reduce, schedule
    stage="int64",  # -1: schedule
    microbatch="int64",  # -1: schedule, reduce
    start_ns="int64",
    dur_ns="int64",
    busy_ns="int64",  # of a schedule: the sum of its chunks; -1: any other
)

# Stalls of the training thread of a millisecond or more that no trace shows, in order of time. A row stands for `count`
# stalls and dur_ns is their sum. count is 1, unless a job had very many garbage collections.
STALLS = Table(
    "stalls",
    kind=CATEGORY,  # garbage_collection, checkpoint, compilation
    start_ns="int64",
    dur_ns="int64",
    step="int64",  # as the recorder counts them
    generation="int64",  # generation of a garbage collection; -1: any other
    path=CATEGORY,  # file of a checkpoint, "": not a named file; function of a compilation
    phase=CATEGORY,  # phase of the step: fetch, forward, backward, optimizer, rest
    reason=CATEGORY,  # why a function was compiled again; "": it was not
    count="int64",
    values_bytes="int64",  # of the tensors of a checkpoint, and of the storages they are in; -1: any other, or unknown
    storage_bytes="int64",
)

# Waits of the training thread for its loaders, and fetches of batches, each in order of time. A row stands for `count`
# events of its kind, and its values are their sums. -1: not measured.
LOADING = Table(
    "loading",
    # start: iter() of a loader. first: its first next(), in which workers start and fetch. batch: each further next().
    # end: workers stop. fetch: a worker makes a batch. usage: resources of the process, not tied to a loader.
    kind=CATEGORY,
    start_ns="int64",
    dur_ns="int64",  # time of the training thread in the call; of a fetch, reading and collating the samples
    count="int64",
    step="int64",  # the step that a batch begins, as the recorder counts them
    loader="int64",  # index into the facts' loaders; -1: unknown
    worker="int64",  # the worker that the batch was due from, or that fetched it; -1: none, or unknown
    pid="int64",  # of a fetch, the worker's
    workers=CATEGORY,  # process ids of an epoch's workers at its start; "": none
    empty="int64",  # how often no batch was ready when requested; -1: no queue
    ready="int64",  # batches that were ready at the request
    outstanding="int64",  # batches that workers still had to fetch
    # CPU time of the whole process. Of a fetch: of the worker since its previous batch. Of a batch that the training
    # thread fetches itself: of that thread.
    cpu_ns="int64",
    delay_ns="int64",  # time that the training thread, or the worker, waited for a core
    thread_ns="int64",  # CPU time of the training thread alone
    pin_ns="int64",  # CPU time of the thread that pins a loader's batches
    # Only for a fetch, and for a batch that the training thread fetches itself:
    collate_ns="int64",
    stored_bytes="int64",  # read from storage
    read_bytes="int64",  # all bytes read: from files, from the page cache and through pipes
    tensors="int64",  # in the batch
    tensor_bytes="int64",  # size of these tensors
    # Of a fetch: size of the storages that these tensors are parts of, and that shared memory does not hold yet. The
    # worker copies each whole.
    copied_bytes="int64",
    # Of a sample of this batch that is watched, where count is 1: its index, the length of its data set, a digest of
    # its content, and its size.
    sample="int64",
    of_samples="int64",
    digest="int64",
    sample_bytes="int64",
)

# What gradient scalers (torch.amp.GradScaler) did, in order of time. A row stands for `count` events of its kind, and
# describes the last one.
LOSS_SCALE = Table(
    "loss_scale",
    at_ns="int64",
    step="int64",  # as the recorder counts them
    # began: its first step; skipped: gradients overflowed and the optimizer did not step; grown: after enough steps
    # without overflow; set: by the script; unknown: from here on only the device knows which steps are skipped
    kind=CATEGORY,
    scaler="int64",  # numbered as they were made
    scale="float64",  # afterwards; NaN: unknown
    interval="int64",  # steps after which the scale grows, on rows of kind began; -1: elsewhere
    count="int64",
)

# The losses of a job that was asked for them (--losses), in their order: the scalars that backward passes began with.
LOSSES = Table(
    "losses",
    step="int64",  # as the recorder counts them
    loss="float64",  # before a gradient scaler, all bits; NaN: not finite
)

# What PyTorch's CUDA allocator held on the device that the rank trains on, a few rows a second. -1: unknown.
MEMORY = Table(
    "memory",
    at_ns="int64",
    step="int64",  # the last step that had ended
    device="int64",
    allocated_bytes="int64",  # by tensors
    reserved_bytes="int64",  # taken from the device
    peak_allocated_bytes="int64",  # since the script last reset it
    peak_reserved_bytes="int64",
    retries="int64",  # so far: allocations that succeeded only after the cache was emptied
    ooms="int64",  # so far: allocations that failed
    device_allocs="int64",  # so far: cudaMalloc and similar calls
    device_frees="int64",
)

# What a rank's memory held in one step, each storage once. If several tensors share a storage, each row has the bytes
# of its own tensors. Gradients are those after the backward pass; activations are those at their peak.
HELD = Table(
    "held",
    # parameter, cast (copies of parameters that autocast made), gradient, optimizer (its state and master copies),
    # buffer, activation (kept for the backward pass), input (of the model), communication (buckets of
    # DistributedDataParallel that are no gradients themselves, parameters that FSDP has gathered), shared (0 bytes:
    # parameters of this module that are counted for another one)
    part=CATEGORY,
    module=CATEGORY,  # its path in the script's model; "": the model itself, or unknown
    kind=CATEGORY,  # the module's class; "": unknown
    device=CATEGORY,  # where they are: cpu, cuda:0
    dtype=CATEGORY,  # float32
    tensors="int64",
    bytes="int64",  # on this rank
    full_bytes="int64",  # before sharding; for shared, the size of the parameters
    trainable="int64",  # 1: parameters that require a gradient; 0: any other
)

# What PyTorch's CUDA allocator did, from a snapshot; in order for each device. -1 and "": unknown.
MEMORY_EVENTS = Table(
    "memory_events",
    device="int64",
    at_ns="int64",
    # alloc, free_requested (by the script), free_completed (usable again), segment_alloc, segment_free, segment_map,
    # segment_unmap (memory taken from the device and returned), oom (none was left), snapshot
    action=CATEGORY,
    address="int64",  # -1: action oom
    bytes="int64",
    stream="int64",
    pool=CATEGORY,  # id of the memory pool, "": the default one
    site=CATEGORY,  # the user's line, "function (file:line)"; if there is none: dlprof/read/dumps/pickles.py
    via=CATEGORY,  # the function of PyTorch or a library that this line called
    category=CATEGORY,
    free_bytes="int64",  # left on the device, for action oom
)

# The blocks of PyTorch's CUDA allocator in a snapshot. A segment is memory that it got from the device in one call.
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

# A rank's collectives in PyTorch's flight recorder, in order of issue. -1 and "": unknown.
RECORDER_CALLS = Table(
    "recorder_calls",
    record="int64",
    group=CATEGORY,  # the process group's name, as PyTorch numbers them
    about=CATEGORY,  # its description, "": none
    kind=CATEGORY,  # collective, p2p
    sequence="int64",  # number of the call among those of its kind in its group, the same on all its ranks
    op=CATEGORY,  # all_reduce, send 0->1, ...
    backend=CATEGORY,  # nccl, gloo, ...
    state=CATEGORY,  # scheduled, started (on the device), completed
    retired="int64",  # 1: the process no longer waits for it
    created_ns="int64",
    started_ns="int64",
    completed_ns="int64",
    timeout_ms="int64",
    input=CATEGORY,  # sizes of its input tensors: "1000", "2x3, 4"
    output=CATEGORY,
    dtype=CATEGORY,
    site=CATEGORY,  # as in MEMORY_EVENTS
    via=CATEGORY,
)

# The readings of the samplers that run beside the rank; each metric in order of time. Counters (CPU seconds, bytes
# sent, page faults) are stored as they were read, and may restart at 0.
SAMPLES = Table(
    "samples",
    source=CATEGORY,  # gpu, host (on the first rank of a host), processes (the rank's own)
    metric=CATEGORY,  # the sampler's name for it, with the unit: power_w, cpu_share, rss_bytes
    at_ns="int64",
    value="float64",  # never NaN: a missing reading has no row
)

# Distinct Python stacks and how often each was sampled, at equal intervals.
STACKS = Table(
    "stacks",
    # main (training thread), thread (another one of the rank), worker (of a loader), other (process); start and
    # start_worker: main and worker before the first step was done
    role=CATEGORY,
    thread=CATEGORY,  # its name
    phase=CATEGORY,  # of the step, on main: fetch, forward, backward, optimizer, rest; "" elsewhere
    stack=CATEGORY,  # "name (file:line)" from the outermost on, joined by ";"
    samples="int64",  # how often; for another tool, the sum of its weights in `unit`
    profile=CATEGORY,  # the file, for another tool; "": sampled by dlprof while training
    unit=CATEGORY,  # samples, ns, bytes
)

# Functions as a deterministic profiler counts them.
FUNCTIONS = Table(
    "functions",
    profile=CATEGORY,  # the profile's file
    function=CATEGORY,
    file=CATEGORY,
    line="int64",  # the function's first line
    calls="int64",
    own_ns="int64",
    total_ns="int64",  # includes what it called
)

# The effects of settings that `--set` overrides: a row for each place in the script where one took effect, or one row
# if no place is known.
OVERRIDES = Table(
    "overrides",
    name=CATEGORY,  # as on the command line: loader.num_workers
    value=CATEGORY,
    before=CATEGORY,  # the script's own value; several are joined by ", "
    applied="int64",  # how often it took effect, at all places; 0: never
    file=CATEGORY,  # "": no place is known
    line="int64",  # -1: no place is known
    function=CATEGORY,
    error=CATEGORY,  # why it did not take effect, or not everywhere; "": no error
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
        LOSSES,
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
    """Return the frame if its columns and dtypes are those of the table `name`; else raise DlprofError."""
    columns = TABLES[name]
    if list(frame.columns) != list(columns):
        raise DlprofError(f"table {name}: columns are {list(frame.columns)}, not {list(columns)}")
    dtypes = frame.dtypes
    wrong = [c for c, dtype in columns.items() if str(dtypes[c]) != dtype]
    if wrong:
        raise DlprofError(f"table {name}: {wrong[0]} is {dtypes[wrong[0]]}, not {columns[wrong[0]]}")
    return frame


def join(name: str, parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate tables of one name, in their order."""
    import pandas as pd
    from pandas.api.types import union_categoricals

    parts = [part for part in parts if len(part)] or parts[:1]  # categories of an empty part have no type
    columns = {
        c: union_categoricals([part[c] for part in parts])
        if dtype == CATEGORY
        else np.concatenate([part[c].to_numpy() for part in parts])
        for c, dtype in TABLES[name].items()
    }
    return check(name, pd.DataFrame(columns))


def empty(name: str) -> pd.DataFrame:
    """Return a table without rows."""
    import pandas as pd

    return pd.DataFrame({c: pd.Series([], dtype=dtype) for c, dtype in TABLES[name].items()})
