"""The process that samples a host while a job runs: `python -S .../samplers/__main__.py RUN PARENT PATH...`, ended by
its stdin. PATH... is where else modules are.

It is started by its place, so that it works wherever dlprof was found.
"""

# ruff: noqa: E402 - the path comes first

import os
import sys

os.nice(10)

# Neither the current folder nor this one may stand before the standard library: both hold modules of any name.
del sys.path[0]
_PLACE = __file__.rpartition("/dlprof/record/samplers/")[0]
if _PLACE not in sys.path:
    sys.path.insert(0, _PLACE)
sys.path += sys.argv[3:]

import signal
from pathlib import Path

from dlprof.plain import tell, words_of
from dlprof.record.launch.process import OF_THE_JOB, tie
from dlprof.record.samplers import SAMPLERS
from dlprof.record.samplers.sampling import sample


def main() -> None:
    """Sample until stdin ends. Signals are for the job: what ends it ends this process too, a moment later."""
    tie(signal.SIGKILL, int(sys.argv[2]))
    for number in OF_THE_JOB:
        # A handler, since an ignored signal would stay ignored in the children of samplers.
        signal.signal(number, lambda _number, _frame: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    code = 1
    try:
        sample(Path(sys.argv[1]), SAMPLERS, sys.stdin.fileno())
        code = 0
    except Exception as e:  # noqa: BLE001 - one line, and no traceback among the job's words
        tell(f"nothing is sampled: {words_of(e)}; the job goes on without it")
    # Nothing is left to do, and an interpreter takes a while to take itself apart.
    os._exit(code)


main()
