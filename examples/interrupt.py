"""Ctrl-C that works at once, whatever the process is waiting for."""

import multiprocessing
import os
import signal
import threading


def end_on_interrupt() -> None:
    """Have SIGINT end this process and those that it started through `multiprocessing`, at once and silently.

    Python's own handler waits for the main thread, which may be waiting in a collective for a rank that is gone. Here a
    thread waits for the signal. To be called before any other thread starts, which then inherits the blocked signal.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    threading.Thread(target=_wait_for_interrupt, daemon=True).start()


def _wait_for_interrupt() -> None:
    signal.sigwait([signal.SIGINT])
    for child in multiprocessing.active_children():  # Megatron's checkpoint writers, which ignore the signal
        child.kill()
    os._exit(128 + signal.SIGINT)
