"""Where in the model the time goes: structs of the result."""

from __future__ import annotations

import msgspec


class Module(msgspec.Struct, frozen=True):
    """One module with all modules inside it, or a repeated layer; in a mean traced step, mean of the ranks.

    `path`: "encoder.layer.*" for identical `modules`; "" is the model itself. `kind`: its class; "": a container that
    is never called. `depth`: 0 for the outermost; deeper rows after it are inside it. `ns`: its time of the step,
    `share` of it; `own_ns`: in none of the rows inside. `host_ns`: time that threads spend in it. `device_ns`: of all
    device work that it launched, overlapped or not. `rank`: the rank with the longest time, `rank_ns`. `slowest`: of a
    repeated layer, the module with a clearly longer time (`slowest_ns`) than the median one (`typical_ns`); "": none.
    `compiled`: torch.compile compiled it as one region. `fused`: the modules of its compiled kernels are known; a
    kernel that several modules share counts to the module around them. None: not known.
    """

    path: str
    kind: str
    depth: int
    modules: int
    calls: float
    ns: float
    own_ns: float
    share: float
    forward_ns: float
    recompute_ns: float
    backward_ns: float
    communication_ns: float
    host_ns: float
    device_ns: float
    rank: int
    rank_ns: float
    slowest: str = ""
    slowest_ns: float = 0.0
    typical_ns: float = 0.0
    compiled: bool = False
    fused: bool = False
    flops: float | None = None
    flops_per_s: float | None = None  # while it computes
    mfu: float | None = None  # the same over the device's peak
    copied_bytes: float | None = None
    moved_bytes: float | None = None  # that its operators read and write, each tensor whole
    parameter_bytes: float | None = None  # that a rank has of it
    held_bytes: float | None = None  # of parameters, gradients, the optimizer's state and activations


class Outside(msgspec.Struct, frozen=True):
    """What no module does: `part` of the step.

    optimizer; input (the loader); forward, backward and communication (of what is no module, as a loss that is a
    function); graphs (CUDA graphs); other; idle (the device does nothing).
    """

    part: str
    ns: float
    share: float


class Modules(msgspec.Struct, frozen=True):
    """The tree of the model's modules, each above those inside it, the largest first; and what is outside of them.

    The outermost modules and `outside` make up the mean traced step, `total_ns`, of `ranks`. `on_device`: time is that
    of the device, else that of the training thread. `naming_ns`: what a traced step takes to name them; None: unknown.
    `why`: no module is known.
    """

    on_device: bool = False
    total_ns: float = 0.0
    rows: tuple[Module, ...] = ()
    outside: tuple[Outside, ...] = ()
    ranks: int = 0
    naming_ns: float | None = None
    why: str = ""


class InModule(msgspec.Struct, frozen=True):
    """How much of what a finding is about is in a module: `share`. `path`: as of Module; "" and no class: outside."""

    path: str
    kind: str
    share: float
