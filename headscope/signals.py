"""Ctrl-C and SIGTERM: both end the work in one way, wherever they come.

Work ends by KeyboardInterrupt, so that what is open is closed. Where an exception would be lost or would leave a
half-imported library behind, the process ends at once; of a run nothing is lost by that, since every step of writing
one is a rename.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn

EXIT_CODE = 4
TYPER_EXIT_CODE = 130
"""What typer makes of a KeyboardInterrupt."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
MESSAGE = "headscope: interrupted; cells that a run had finished are kept, and --resume goes on with them"
SHOW_CURSOR = "\x1b[?25h"
"""A bar on a terminal hides it."""


def install_handlers() -> None:
    """From here on, the first signal raises KeyboardInterrupt and a second ends the process at once, with one line.

    For a process of our own: it stays so until the end, when signals are ignored.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) in (
        _on_first_signal,
        _on_next_signal,
    ):
        return
    unraisable, uncaught = sys.unraisablehook, sys.excepthook

    def lost(what: Any) -> None:
        """An exception in a callback or a finaliser goes nowhere."""
        if issubclass(what.exc_type, KeyboardInterrupt):
            exit_now()
        unraisable(what)

    def escaped(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            exit_now()
        uncaught(kind, error, at)

    sys.unraisablehook, sys.excepthook = lost, escaped
    atexit.register(_ignore_signals)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` and the like
            signal.signal(number, _on_first_signal)


def exit_now() -> NoReturn:
    """End this process now, with one line."""
    shown = SHOW_CURSOR if os.isatty(2) else ""
    os.write(2, f"{shown}{MESSAGE}\n".encode())
    os._exit(EXIT_CODE)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let signals wait until the block is done. Elsewhere than in the main thread none comes anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        came.append(number)

    # SIGINT first and last: it is the one that raises where nobody asked for anything.
    before = {number: signal.signal(number, wait) for number in SIGNALS}
    try:
        yield
    finally:
        for number in reversed(SIGNALS):
            signal.signal(number, before[number])
        for each in came:
            signal.raise_signal(each)


def _on_first_signal(number: int, frame: FrameType | None) -> None:
    for each in SIGNALS:
        if signal.getsignal(each) is _on_first_signal:
            signal.signal(each, _on_next_signal)
    if _is_importing(frame):
        exit_now()
    raise KeyboardInterrupt


def _on_next_signal(number: int, frame: FrameType | None) -> None:
    exit_now()


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported: libraries swallow what is raised there, or are left half-imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _ignore_signals() -> None:
    """As the interpreter ends it gives signals back to the system, which would kill a process whose work is done."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
