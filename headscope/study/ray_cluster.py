"""Connection to Ray, at an address or started on this machine, and the resources of each worker."""

import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from headscope.base import user_input
from headscope.compat import ray as compat
from headscope.errors import BadInput, Interrupted
from headscope.study.config import EngineOptions

OBJECT_STORE_BYTES = 256 * 2**20
"""Size of the object store, which holds rows in transit, of a Ray that headscope starts."""
ADDRESS_TIMEOUT = 8.0
"""Seconds in which an address must answer."""
MAX_START_ATTEMPTS = 3
"""How often headscope tries to start Ray."""
NEEDED_PROCESSES = {"raylet", "gcs_server"}
"""Processes of a node without which no job can run; a node also has a monitor and a dashboard."""
TEMP_FOLDER_PREFIX = f"headscope-ray-{socket.gethostname()}-"
"""Start of the name of Ray's temporary folder; the process that created it follows. Machines may share the folder."""


@dataclass(frozen=True)
class WorkerResources:
    """The number of workers, and the cores and GPUs of each."""

    workers: int
    cpus: int
    gpus: float


@contextmanager
def connect_to_ray(options: EngineOptions, device: str) -> Iterator[WorkerResources]:
    """Connect to the Ray that this process uses already, to the one at the address, or to a new one on this machine."""
    import ray

    if ray.is_initialized():
        yield _allocate_workers(options, device)
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    temp_folder = None
    try:
        if options.address is not None:
            _connect_to_address(options.address)
        else:
            _remove_abandoned_folders()
            temp_folder = tempfile.mkdtemp(prefix=f"{TEMP_FOLDER_PREFIX}{os.getpid()}-")
            _start_local_ray(max(os.cpu_count() or 1, options.workers or 1), temp_folder)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray's handlers would end this process
                signal.signal(number, handler)
        yield _allocate_workers(options, device)
    finally:
        ray.shutdown()
        if temp_folder is not None:
            shutil.rmtree(temp_folder, ignore_errors=True)


def _start_local_ray(cores: int, temp_folder: str) -> None:
    """Start Ray on this machine. It listens on the loopback interface only and sends no usage statistics."""
    # On other systems than Linux, Ray stays on the loopback interface if its processes find this in the environment.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"], os.environ["RAY_USAGE_STATS_ENABLED"] = "0", "0"
    try:
        with (
            compat.staying_on_loopback(),
            compat.muting_worker_errors(),
            compat.ending_processes_of_failed_starts(),
        ):
            _init_ray_with_retries(
                num_cpus=cores,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **compat.local_options(temp_folder),
            )
    finally:
        del os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]


def _init_ray_with_retries(**options: Any) -> None:
    """Start Ray, several times if necessary: on a busy machine the first start may exceed Ray's timeout of 30 s.

    Raises Interrupted if every attempt fails.
    """
    import ray

    for remaining_attempts in reversed(range(MAX_START_ATTEMPTS)):
        try:
            ray.init(**options)
            return
        except Exception as error:  # Ray raises a plain Exception
            ray.shutdown()
            if not remaining_attempts:
                reason = " ".join(str(error).split())[:100]
                raise Interrupted(
                    f"Ray does not start ({reason} ...). Try again on a less busy machine, or use --engine plain"
                ) from error


def check_local_ray() -> None:
    """Raise Interrupted if a process that the Ray on this machine needs ended: Ray itself would wait without end."""
    if dead := sorted(compat.dead_processes() & NEEDED_PROCESSES):
        raise Interrupted(
            f"Ray's process {', '.join(dead)} ended unexpectedly. Finished work items are kept; add "
            "--resume to continue"
        )


def _remove_abandoned_folders() -> None:
    """Remove the temporary folders of processes that were killed before they could do so."""
    for folder in Path(tempfile.gettempdir()).glob(f"{TEMP_FOLDER_PREFIX}*-*"):
        owner = folder.name.removeprefix(TEMP_FOLDER_PREFIX).partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def check_address(address: str) -> None:
    """Raise BadInput for an address HOST:PORT at which nothing answers: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return  # a name such as auto
    try:
        socket.create_connection((host.strip("[]"), int(port)), ADDRESS_TIMEOUT).close()
    except (OSError, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(
            f"no Ray cluster answers at {user_input.quote(address)} ({reason}). Start one, or leave out --address"
        ) from error


def _connect_to_address(address: str) -> None:
    import ray

    try:
        with compat.muting_worker_errors():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"no Ray cluster at '{address}' ({reason}). Start one, or leave out --address") from error


def _allocate_workers(options: EngineOptions, device: str) -> WorkerResources:
    """Divide the cluster among the workers. Raises BadInput if it is too small."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = ([node.get(resource, 0.0) for node in nodes] for resource in ("CPU", "GPU"))
    per_worker = options.gpus_per_worker
    if per_worker is None:
        per_worker = 1.0 if any(gpus) and device != "cpu" else 0.0
    capacity = sum(int(count // per_worker) for count in gpus) if per_worker else sum(map(int, cpus))
    workers = options.workers or (capacity if per_worker else 2)
    if not 0 < workers <= capacity:
        hardware = f"{sum(gpus):g} GPUs with {per_worker:g} per worker" if per_worker else f"{sum(cpus):g} cores"
        raise BadInput(
            f"{workers} workers do not fit on {hardware}. Give --workers, at most {capacity}, or --gpus-per-worker"
        )
    shares = range(int(max(cpus)), 0, -1)
    largest = next(share for share in shares if sum(int(count // share) for count in cpus) >= workers)
    return WorkerResources(workers, largest, per_worker)
