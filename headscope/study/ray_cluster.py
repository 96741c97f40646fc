"""A Ray to work with - the one at an address, or one of our own on the loopback - and what a worker gets of it."""

import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from headscope.errors import BadInput, Interrupted
from headscope.study.config import EngineOptions

OBJECT_STORE_BYTES = 256 * 2**20
"""Bytes of a Ray of our own for rows on their way."""
MAX_START_ATTEMPTS = 3
"""So often a Ray of our own is started in vain."""


@dataclass(frozen=True)
class WorkerResources:
    """How many workers there are, and what each may use."""

    workers: int
    cpus: int
    gpus: float


@contextmanager
def connect_to_ray(options: EngineOptions, device: str) -> Iterator[WorkerResources]:
    """A Ray to work with: the one at an address, the one that this process uses already, or one of our own."""
    import ray

    if ray.is_initialized():
        yield _allocate_workers(options, device)
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    own = None
    try:
        if options.address is not None:
            _connect_to_address(options.address)
        else:
            own = tempfile.mkdtemp(prefix="headscope-ray-")
            _start_local_ray(max(os.cpu_count() or 1, options.workers or 1), own)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray's own would end this process
                signal.signal(number, handler)
        yield _allocate_workers(options, device)
    finally:
        ray.shutdown()
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)


def _start_local_ray(cores: int, temp_folder: str) -> None:
    """Start a Ray on this machine that listens on the loopback alone and tells nobody of itself."""
    import ray

    # Elsewhere than on Linux a Ray stays on the loopback of itself; its processes read that from the environment.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"], os.environ["RAY_USAGE_STATS_ENABLED"] = "0", "0"
    try:
        with patch.object(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False), _mute_worker_errors():
            _init_ray_with_retries(
                num_cpus=cores,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",
                _temp_dir=temp_folder,
            )
    finally:
        del os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]


def _init_ray_with_retries(**options: Any) -> None:
    """Ray waits half a minute for itself, which a busy machine may exceed at first. Raises Interrupted in the end."""
    import ray

    for left in reversed(range(MAX_START_ATTEMPTS)):
        try:
            ray.init(**options)
            return
        except Exception as error:  # it has no kind of its own
            ray.shutdown()
            if not left:
                said = " ".join(str(error).split())[:100]
                raise Interrupted(
                    f"Ray does not start ({said} ...): try again when this machine is less busy, or --engine plain"
                ) from error


def _connect_to_address(address: str) -> None:
    import ray

    try:
        with _mute_worker_errors():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        said = " ".join(str(error).split())[:200]
        raise BadInput(f"no Ray cluster answers at '{address}' ({said}): start one, or leave out --address") from error


def _mute_worker_errors() -> AbstractContextManager[Any]:
    """Ray prints on standard output that a worker died, whatever it is asked; we tell of that ourselves."""
    import ray

    return patch.object(ray._private.worker, "listen_error_messages", lambda *_: None)


def _allocate_workers(options: EngineOptions, device: str) -> WorkerResources:
    """What every worker gets of a cluster. Raises BadInput where it has not enough."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = ([node.get(what, 0.0) for node in nodes] for what in ("CPU", "GPU"))
    per_worker = options.gpus_per_worker
    if per_worker is None:
        per_worker = 1.0 if any(gpus) and device != "cpu" else 0.0
    fit = sum(int(have // per_worker) for have in gpus) if per_worker else sum(map(int, cpus))
    workers = options.workers or (fit if per_worker else 2)
    if not 0 < workers <= fit:
        have = f"{sum(gpus):g} GPUs, {per_worker:g} a worker" if per_worker else f"{sum(cpus):g} cores"
        raise BadInput(f"{workers} workers do not fit on {have}: give --workers, at most {fit}, or --gpus-per-worker")
    share = next(share for share in range(int(max(cpus)), 0, -1) if sum(int(have // share) for have in cpus) >= workers)
    return WorkerResources(workers, share, per_worker)
