"""SIGTERM ends the process like an error, so that engines close and jobs report how far they came."""

import _thread
import os
import signal
import sys
import threading
import time

_TERMINATED = 128 + signal.SIGTERM
_ENDING_S = 60.0


def end_on_sigterm() -> None:
    """Raise SystemExit in the main thread on SIGTERM; a second SIGTERM ends the process at once."""
    signal.signal(signal.SIGTERM, _terminated)
    sys.unraisablehook = _unraisable


def _terminated(*_: object) -> None:
    """Raise SystemExit; it may interrupt code that holds a lock, so after `_ENDING_S` the process ends anyway."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _thread.start_new_thread(_end_later, ())  # `threading` takes locks that the main thread may hold
    raise SystemExit(_TERMINATED)


def _unraisable(lost: "sys.UnraisableHookArgs") -> None:
    """Send the signal again where Python dropped its exception, as it does in a finalizer."""
    if lost.exc_type is not SystemExit or threading.current_thread() is not threading.main_thread():
        sys.__unraisablehook__(lost)
        return
    signal.signal(signal.SIGTERM, _terminated)
    _thread.start_new_thread(_signal_again, ())


def _signal_again() -> None:
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)


def _end_later() -> None:
    time.sleep(_ENDING_S)
    os._exit(_TERMINATED)
