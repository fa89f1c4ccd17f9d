"""Every rule there is: one file each, whose docstring is its manual."""

from dlprof.diagnosis import Rule
from dlprof.rules import (
    checkpoint_stall,
    data_parallel,
    exposed_communication,
    exposed_copy,
    gc_pauses,
    host_bound,
    host_sync,
    input_wait,
    pageable_copy,
    pipeline_bubble,
    recompilation,
    slow_worker_batches,
    straggler,
    thread_oversubscription,
    unfused_optimizer,
    unused_parameters,
    validation_share,
    worker_restart,
)

RULES: tuple[Rule, ...] = (
    checkpoint_stall.RULE,
    data_parallel.RULE,
    exposed_communication.RULE,
    exposed_copy.RULE,
    gc_pauses.RULE,
    host_bound.RULE,
    host_sync.RULE,
    input_wait.RULE,
    pageable_copy.RULE,
    pipeline_bubble.RULE,
    recompilation.RULE,
    slow_worker_batches.RULE,
    straggler.RULE,
    thread_oversubscription.RULE,
    unfused_optimizer.RULE,
    unused_parameters.RULE,
    validation_share.RULE,
    worker_restart.RULE,
)
