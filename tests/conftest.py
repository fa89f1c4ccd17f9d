"""What holds for all tests: what they start can be interrupted."""

import signal

# A shell's background jobs, nohup and some runners of CI ignore these, and so would every process that a test starts.
for _number, _usual in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _usual)
