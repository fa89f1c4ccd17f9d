"""The two expected failures: the user's mistake, and what cannot be known of a run."""


class DlprofError(Exception):
    """A mistake of the user's or an input that cannot be used: what, where, and what to do, in one line."""


class NotMeasured(Exception):  # noqa: N818 - an answer, not an error
    """What cannot be known of a run: why, and what to do so that it can."""
