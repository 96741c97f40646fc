"""Each piece of work in a child forked from this process, which has imported what all need, with a time limit."""

import gc
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch

LIMIT = 120.0
"""Seconds that a child may take."""


def run_in_processes(work: Sequence[Callable[[], Any]], max_processes: int) -> Iterator[tuple[int, Any, float]]:
    """Yield (index, what the work returned or the exception that it died of, seconds) as each finishes."""
    gc.freeze()  # else every child copies what it inherited, to count references to it
    waiting = list(enumerate(work))[::-1]
    running: dict[Connection, tuple[int, int, float]] = {}
    while waiting or running:
        while waiting and len(running) < max_processes:
            index, job = waiting.pop()
            receiving, sending = Pipe(duplex=False)
            child = os.fork()
            if child == 0:
                _work(job, sending)
            sending.close()
            running[receiving] = (index, child, time.monotonic())
        ready = wait(list(running), timeout=1)
        for connection, (index, child, start) in list(running.items()):
            seconds = time.monotonic() - start
            if connection in ready:
                try:
                    result = pickle.loads(connection.recv_bytes())
                except EOFError:
                    result = RuntimeError("the child died")
            elif seconds > LIMIT:
                os.kill(child, 9)
                result = TimeoutError(f"no answer in {LIMIT:g} s")
            else:
                continue
            os.waitpid(child, 0)
            connection.close()
            del running[connection]
            yield index, result, seconds


def _work(job: Callable[[], Any], sending: Connection) -> None:
    """Do it and leave at once, without the parent's exit handlers."""
    torch.set_num_threads(1)
    try:
        result: Any = job()
    except BaseException as error:
        result = RuntimeError(f"{type(error).__name__}: {error}")
    sending.send_bytes(pickle.dumps(result))
    os._exit(0)
