"""What a collective takes by its bytes and ranks: Hockney's model, fitted to measured times.

A message of m bytes between two ranks takes α + m·β: α to start it, β for each byte (R. Hockney, "The communication
challenge for MPP", Parallel Computing 20, 1994). A collective is some messages one after the other. How many, and of
how many bytes, is that of the ring and pairwise algorithms in R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of
Collective Communication Operations in MPICH", IJHPCA 19, 2005, without their term for adding numbers up, which is part
of β here. Of n ranks and B bytes, counted as nccl-tests counts them (an all-gather's are its output's):

    all_reduce                  2(n−1)·α + 2(n−1)/n·B·β     ring: a reduce-scatter, then an all-gather
    all_gather, reduce_scatter   (n−1)·α +  (n−1)/n·B·β     ring
    all_to_all                   (n−1)·α +  (n−1)/n·B·β     pairwise
    send_recv                         α +          B·β     each rank to the next, all at once

Libraries take other algorithms too: a tree starts in 2·log₂(n) messages. α is then an effective one, and what is
predicted for many more ranks than were measured is too long for small messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlprof.errors import NotMeasured

Floats = NDArray[np.float64]

# Messages one after the other, by ranks; each is 1/n of the bytes, but for send_recv, whose one message has them all.
_MESSAGES: Mapping[str, Callable[[Floats], Floats]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "all_to_all": lambda n: n - 1,
    "send_recv": np.ones_like,
}
MODELLED = tuple(_MESSAGES)


@dataclass(frozen=True)
class AlphaBeta:
    """A fit of the model to one collective. NaN: an error that two points do not tell.

    `alpha_error_s` and `beta_error_s_per_byte` are standard errors. `off`: how far the measured times are from the
    model, as a share of them (root mean square). `ranks`: the world sizes that were measured.
    """

    collective: str
    alpha_s: float
    beta_s_per_byte: float
    alpha_error_s: float
    beta_error_s_per_byte: float
    off: float
    ranks: tuple[int, ...]

    def predict(self, collective: str, bytes: ArrayLike, ranks: ArrayLike) -> Floats:  # noqa: A002 - the unit
        """Return what collectives take by these α and β, seconds: of one bytes × ranks, broadcast as NumPy does.

        Another collective than the fitted one is taken to start and to move bytes alike. Raises ValueError for one that
        the model does not have.
        """
        starts, moved = terms(collective, bytes, ranks)
        predicted: Floats = starts * self.alpha_s + moved * self.beta_s_per_byte
        return predicted


def terms(collective: str, bytes: ArrayLike, ranks: ArrayLike) -> tuple[Floats, Floats]:  # noqa: A002 - the unit
    """Return what α and β are multiplied by: messages one after the other, and the bytes of these.

    Raises ValueError for a collective that the model does not have.
    """
    if collective not in _MESSAGES:
        raise ValueError(f"no model of {collective}; there are: {', '.join(MODELLED)}")
    n, size = np.asarray(ranks, dtype=float), np.asarray(bytes, dtype=float)
    starts = _MESSAGES[collective](n)
    return starts, starts * size if collective == "send_recv" else starts * size / n


def fit(bytes: ArrayLike, ranks: ArrayLike, seconds: ArrayLike, collective: str) -> AlphaBeta:  # noqa: A002 - the unit
    """Fit α and β to measured times of one collective: least squares of the relative errors, neither below zero.

    Bytes, ranks and seconds are of one length, or numbers. Relative errors, so that a time of 20 µs counts as much as
    one of 20 ms. Raises NotMeasured where the points do not tell α from β: fewer than two sizes, or ranks.
    """
    size, n, took = np.broadcast_arrays(*(np.atleast_1d(np.asarray(x, dtype=float)) for x in (bytes, ranks, seconds)))
    keep = np.isfinite(took) & (took > 0) & (n > 1)
    size, n, took = size[keep], n[keep], took[keep]
    design = np.stack(terms(collective, size, n), axis=1) / took[:, None]
    # In units in which both columns are of one size: α and β are nine powers of ten apart.
    unit = np.linalg.norm(design, axis=0)
    if len(took) < 2 or not unit.all() or np.linalg.matrix_rank(scaled := design / unit, tol=1e-6) < 2:
        raise NotMeasured(f"{collective}: fewer than two sizes were measured, and these do not tell α from β")
    one = np.ones(len(took))
    found, *_ = np.linalg.lstsq(scaled, one, rcond=None)
    if (found < 0).any():
        # The best with the other at zero: both cannot be negative, for times are not.
        at = int(found.argmax())
        found = np.zeros(2)
        found[at] = max(float(scaled[:, at] @ one), 0.0)  # the column's length is one
    residual = scaled @ found - one
    free = len(took) - 2
    variance = float(residual @ residual) / free if free else np.nan
    errors = np.sqrt(variance * np.diag(np.linalg.inv(scaled.T @ scaled))) / unit
    alpha, beta = found / unit
    return AlphaBeta(
        collective=collective,
        alpha_s=float(alpha),
        beta_s_per_byte=float(beta),
        alpha_error_s=float(errors[0]),
        beta_error_s_per_byte=float(errors[1]),
        off=float(np.sqrt(np.mean(residual**2))),
        ranks=tuple(sorted({int(x) for x in n})),
    )
