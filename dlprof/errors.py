"""The expected failures: the user's mistake, what cannot be known of a run, and what it does not have."""

from __future__ import annotations

import errno


class DlprofError(Exception):
    """A mistake of the user's or an input that cannot be used: what, where, and what to do, in one line."""


class RefusedError(DlprofError):
    """A command that cannot do what its words say, which is known before anything has begun: exit code 2."""


class NotMeasured(Exception):  # noqa: N818 - an answer, not an error
    """What cannot be known of a run: why, and what to do so that it can."""


class DoesNotApply(NotMeasured):
    """What a run does not have, so that no recording could measure it: a GPU, a second rank, a pipeline; and why.

    Who needs the value has none either way, so it is caught as NotMeasured is. Only the answer differs.
    """


def reason(error: OSError) -> str:
    """Return why a file could not be had, for a sentence that names it already."""
    return f"{error.strerror or error}{limit(error)}"


def limit(error: OSError) -> str:
    """Return what to add where the words of the system do not say what is in the way."""
    return " (ulimit -f limits the size of files)" if error.errno == errno.EFBIG else ""
