"""Every rule there is: one file each, whose docstring is its manual."""

from dlprof.analysis.communication.rules import (
    data_parallel,
    exposed_communication,
    hung_collective,
    mismatched_collectives,
    slow_link,
    small_collectives,
    unused_parameters,
)
from dlprof.analysis.compute.rules import (
    fp32_matmul,
    growing_cat,
    misaligned_shapes,
    one_hot_input,
    small_kernels,
    unfused_attention,
    unfused_loss,
    unfused_norm,
    unfused_optimizer,
)
from dlprof.analysis.estimate import Rule
from dlprof.analysis.experts.rules import expert_imbalance
from dlprof.analysis.host.rules import host_bound, host_embedding, host_sync, queued_wait, step_python
from dlprof.analysis.input.rules import input_wait, needless_workers, padding, slow_worker_batches, worker_restart
from dlprof.analysis.machine.rules import idle_cores, shared_cores, thread_oversubscription, throttled_clock
from dlprof.analysis.memory.rules import (
    activation_memory,
    allocator_retries,
    blocking_copy,
    exposed_copy,
    fragmentation,
    memory_growth,
    memory_headroom,
    out_of_memory,
    pageable_copy,
)
from dlprof.analysis.pipeline.rules import devices_in_turn, pipeline_bubble, stage_imbalance
from dlprof.analysis.precision.rules import skipped_steps
from dlprof.analysis.step.rules import (
    checkpoint_stall,
    gc_pauses,
    periodic_work,
    recompilation,
    unused_forward,
    validation_share,
)
from dlprof.analysis.stragglers.rules import straggler

RULES: tuple[Rule, ...] = (
    activation_memory.RULE,
    allocator_retries.RULE,
    blocking_copy.RULE,
    checkpoint_stall.RULE,
    data_parallel.RULE,
    devices_in_turn.RULE,
    expert_imbalance.RULE,
    exposed_communication.RULE,
    exposed_copy.RULE,
    fp32_matmul.RULE,
    fragmentation.RULE,
    gc_pauses.RULE,
    growing_cat.RULE,
    host_bound.RULE,
    host_embedding.RULE,
    host_sync.RULE,
    hung_collective.RULE,
    idle_cores.RULE,
    input_wait.RULE,
    memory_growth.RULE,
    memory_headroom.RULE,
    misaligned_shapes.RULE,
    mismatched_collectives.RULE,
    needless_workers.RULE,
    one_hot_input.RULE,
    out_of_memory.RULE,
    padding.RULE,
    pageable_copy.RULE,
    periodic_work.RULE,
    pipeline_bubble.RULE,
    queued_wait.RULE,
    recompilation.RULE,
    shared_cores.RULE,
    skipped_steps.RULE,
    slow_link.RULE,
    slow_worker_batches.RULE,
    small_collectives.RULE,
    small_kernels.RULE,
    stage_imbalance.RULE,
    step_python.RULE,
    straggler.RULE,
    thread_oversubscription.RULE,
    throttled_clock.RULE,
    unfused_attention.RULE,
    unfused_loss.RULE,
    unfused_norm.RULE,
    unfused_optimizer.RULE,
    unused_forward.RULE,
    unused_parameters.RULE,
    validation_share.RULE,
    worker_restart.RULE,
)
