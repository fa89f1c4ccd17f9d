"""How much a job trains on in a second, and what an epoch or so many samples take: structs of the result."""

from __future__ import annotations

from typing import Literal

import msgspec


class Cost(msgspec.Struct, frozen=True):
    """What a piece of training takes at the measured speed; None: the job has no GPUs, or their power is not known."""

    seconds: float
    gpu_hours: float | None = None
    joules: float | None = None


class Throughput(msgspec.Struct, frozen=True):
    """Samples and tokens of a mean steady step, and in a second; None: not known.

    `source`: what counted them: dlprof.step() of the script, the batches of its loaders, or the model's input. `of`:
    the job, or its mean rank where it is not known whether ranks train on the same batches (`why`). `gpus`: of the
    job. `power_w`: the mean of all of these together while training was steady. `epoch_samples`: what the training set
    holds; `epoch_s`: how long one pass over it takes, with validation and all else between the steps.
    """

    samples_per_s: float | None
    tokens_per_s: float | None
    samples_per_step: float | None
    source: Literal["script", "loader", "model"]
    tokens_per_step: float | None = None
    of: Literal["job", "rank"] = "job"
    why: str = ""
    gpus: int | None = None
    power_w: float | None = None
    epoch_samples: int | None = None
    epoch_s: float | None = None

    def cost(self, seconds: float) -> Cost:
        """Return what so many seconds of training take of GPUs and energy."""
        hours = None if self.gpus is None else self.gpus * seconds / 3600
        return Cost(seconds, hours, None if self.power_w is None else self.power_w * seconds)

    def of_samples(self, n: float) -> Cost | None:
        """Return what training on n samples takes; None: how many a second is not known."""
        return self.cost(n / self.samples_per_s) if self.samples_per_s else None

    def of_tokens(self, n: float) -> Cost | None:
        """Return the same for n tokens."""
        return self.cost(n / self.tokens_per_s) if self.tokens_per_s else None

    @property
    def epoch(self) -> Cost | None:
        """What one pass over the training set takes."""
        return self.cost(self.epoch_s) if self.epoch_s else None
