"""Every rule there is: one file each, whose docstring is its manual."""

from dlprof.diagnosis import Rule
from dlprof.rules import (
    exposed_communication,
    exposed_copy,
    host_bound,
    input_wait,
    pageable_copy,
    straggler,
)

RULES: tuple[Rule, ...] = (
    exposed_communication.RULE,
    exposed_copy.RULE,
    host_bound.RULE,
    input_wait.RULE,
    pageable_copy.RULE,
    straggler.RULE,
)
