"""Run tasks in worker processes, forked from this one after its imports, with a time limit for each task."""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch

TIME_LIMIT = 120.0
"""Seconds that one task may take."""


def run_in_processes(tasks: Sequence[Callable[[], Any]], max_processes: int) -> Iterator[tuple[int, Any, float]]:
    """Yield (index, result of the task or the exception that ended it, seconds) as each task finishes.

    A worker runs one task after another; one that dies or takes too long is replaced.
    """
    gc.freeze()  # else every worker copies what it inherited, to count references to it
    remaining = list(range(len(tasks)))[::-1]
    idle: list[tuple[Connection, int]] = []
    busy: dict[Connection, tuple[int, int, float]] = {}
    while remaining or busy:
        while remaining and len(busy) < max_processes:
            connection, process_id = idle.pop() if idle else _start_worker(tasks)
            task_index = remaining.pop()
            connection.send(task_index)
            busy[connection] = (task_index, process_id, time.monotonic())
        ready = wait(list(busy), timeout=1)
        for connection, (task_index, process_id, start) in list(busy.items()):
            seconds = time.monotonic() - start
            if connection in ready:
                try:
                    result = connection.recv()
                    idle.append((connection, process_id))
                except EOFError:
                    os.waitpid(process_id, 0)
                    result = RuntimeError("the worker process died")
            elif seconds > TIME_LIMIT:
                os.kill(process_id, 9)
                os.waitpid(process_id, 0)
                result = TimeoutError(f"no result in {TIME_LIMIT:g} s")
            else:
                continue
            del busy[connection]
            yield task_index, result, seconds
    for connection, process_id in idle:
        connection.send(None)
        os.waitpid(process_id, 0)


def _start_worker(tasks: Sequence[Callable[[], Any]]) -> tuple[Connection, int]:
    """Fork a worker that answers the index of a task with its result: its connection and process id. None ends it."""
    connection, worker_connection = Pipe()
    process_id = os.fork()
    if process_id:
        worker_connection.close()
        return connection, process_id
    torch.set_num_threads(1)
    while (task_index := worker_connection.recv()) is not None:
        try:
            result: Any = tasks[task_index]()
        except BaseException as error:
            result = RuntimeError(f"{type(error).__name__}: {error}")
        worker_connection.send(result)
    os._exit(0)  # without the parent's exit handlers
