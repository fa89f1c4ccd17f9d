"""The two ways in which dlprof says no: the user's mistake, and what a run cannot say."""


class DlprofError(Exception):
    """A mistake of the user's or an input that cannot be used: what, where, and what to do, in one line."""


class NotMeasured(Exception):  # noqa: N818 - an answer, not an error
    """What a run cannot say; the text tells why, and what to do so that it can."""
