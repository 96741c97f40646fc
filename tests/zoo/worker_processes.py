"""Work in children forked from this process, which has imported what all need, with a time limit for each piece."""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch

LIMIT = 120.0
"""Seconds that one piece of work may take."""


def run_in_processes(work: Sequence[Callable[[], Any]], max_processes: int) -> Iterator[tuple[int, Any, float]]:
    """Yield (index, what the work returned or the exception that it died of, seconds) as each finishes.

    A child does one piece after another; one that dies or takes too long is replaced.
    """
    gc.freeze()  # else every child copies what it inherited, to count references to it
    waiting = list(range(len(work)))[::-1]
    idle: list[tuple[Connection, int]] = []
    running: dict[Connection, tuple[int, int, float]] = {}
    while waiting or running:
        while waiting and len(running) < max_processes:
            connection, child = idle.pop() if idle else _fork(work)
            index = waiting.pop()
            connection.send(index)
            running[connection] = (index, child, time.monotonic())
        ready = wait(list(running), timeout=1)
        for connection, (index, child, start) in list(running.items()):
            seconds = time.monotonic() - start
            if connection in ready:
                try:
                    result = connection.recv()
                    idle.append((connection, child))
                except EOFError:
                    os.waitpid(child, 0)
                    result = RuntimeError("the child died")
            elif seconds > LIMIT:
                os.kill(child, 9)
                os.waitpid(child, 0)
                result = TimeoutError(f"no answer in {LIMIT:g} s")
            else:
                continue
            del running[connection]
            yield index, result, seconds
    for connection, child in idle:
        connection.send(None)
        os.waitpid(child, 0)


def _fork(work: Sequence[Callable[[], Any]]) -> tuple[Connection, int]:
    """A child that answers the index of a piece of work with its result, until it receives None."""
    connection, child_connection = Pipe()
    child = os.fork()
    if child:
        child_connection.close()
        return connection, child
    torch.set_num_threads(1)
    while (index := child_connection.recv()) is not None:
        try:
            result: Any = work[index]()
        except BaseException as error:
            result = RuntimeError(f"{type(error).__name__}: {error}")
        child_connection.send(result)
    os._exit(0)  # without the parent's exit handlers
