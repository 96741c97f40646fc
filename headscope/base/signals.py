"""Handling of Ctrl-C and SIGTERM: both end the work the same way, at any moment.

Work ends with KeyboardInterrupt, so that open resources are closed. If an exception would be lost or would leave a
half-imported library behind, the process exits at once; a run loses nothing, since every step of writing it is a
rename.
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
"""Exit code of typer for a KeyboardInterrupt."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\x1b[?25h"
"""A progress bar hides the cursor."""
_consequence = ""
"""What an interruption of the current command leaves."""
_has_last_line = threading.Event()
"""Set once the process has printed why it ends."""


def install_handlers() -> None:
    """From now on the first signal raises KeyboardInterrupt, and a second one ends the process at once with one line.

    For a process of our own, until it ends; signals are ignored while it ends.
    """
    global _consequence
    _has_last_line.clear()
    _consequence = ""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) in (
        _on_first_signal,
        _on_next_signal,
    ):
        return
    unraisable, uncaught = sys.unraisablehook, sys.excepthook

    def on_unraisable(unraisable_error: Any) -> None:
        """An exception in a callback or finaliser would be lost."""
        if issubclass(unraisable_error.exc_type, KeyboardInterrupt):
            exit_now()
        unraisable(unraisable_error)

    def on_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            exit_now()
        uncaught(kind, error, traceback)

    sys.unraisablehook, sys.excepthook = on_unraisable, on_uncaught
    atexit.register(_ignore_signals)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _on_first_signal)


def announce_resume(is_requested: bool) -> None:
    """Say in the message of an interruption that the current command keeps what is finished."""
    global _consequence
    _consequence = f"; finished work items are kept. {resume_advice(is_requested)}"


def resume_advice(is_requested: bool) -> str:
    """How to continue a command that resumes by itself or with its flag, if it was requested, or only with the flag."""
    return f"{'Repeat the command' if is_requested else 'Add --resume'} to continue"


def message() -> str:
    """The line of an interrupted command."""
    return f"headscope: interrupted{_consequence or '. Repeat the command'}"


def claim_last_line() -> bool:
    """Return True if no line says yet why the process ends; the caller must print it. Later calls return False."""
    is_first = not _has_last_line.is_set()
    _has_last_line.set()
    return is_first


def exit_now() -> NoReturn:
    """End this process now, with one line."""
    if claim_last_line():
        prefix = SHOW_CURSOR if os.isatty(2) else ""
        os.write(2, f"{prefix}{message()}\n".encode())
    os._exit(EXIT_CODE)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay signals until the block is done. Threads other than the main thread receive none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        received.append(number)

    # SIGINT first and last: its default handler raises an exception.
    before = {number: signal.signal(number, wait) for number in SIGNALS}
    try:
        yield
    finally:
        for number in reversed(SIGNALS):
            signal.signal(number, before[number])
        for received_number in received:
            signal.raise_signal(received_number)


def _on_first_signal(number: int, frame: FrameType | None) -> None:
    for other in SIGNALS:
        if signal.getsignal(other) is _on_first_signal:
            signal.signal(other, _on_next_signal)
    if _is_importing(frame):
        exit_now()
    raise KeyboardInterrupt


def _on_next_signal(number: int, frame: FrameType | None) -> None:
    exit_now()


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported: libraries swallow exceptions there, or are left half-imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _ignore_signals() -> None:
    """When the interpreter ends it restores default handlers, which would kill a process whose work is done."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
