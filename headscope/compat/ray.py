"""Private names of Ray: how it starts on this machine, which of its processes ended, what it prints."""

from contextlib import AbstractContextManager
from typing import Any

from headscope.compat.library_name import Library, LibraryName

RAY = Library("ray", ("2.60.0",))

CLUSTER_SETTING = LibraryName(
    RAY, "ray._private.ray_constants:ENABLE_RAY_CLUSTER", "keeping Ray on the loopback interface"
)
NODE = LibraryName(RAY, "ray._private.node:Node", "ending the processes of a failed start")
KILL_PROCESSES = LibraryName(
    RAY,
    "ray._private.node:Node.kill_all_processes",
    "ending the processes of a failed start",
    ("check_alive", "allow_graceful"),
)
DEAD_PROCESSES = LibraryName(RAY, "ray._private.node:Node.dead_processes", "noticing processes of Ray that ended")
GLOBAL_NODE = LibraryName(RAY, "ray._private.worker:_global_node", "noticing processes of Ray that ended")
ERROR_LISTENER = LibraryName(RAY, "ray._private.worker:listen_error_messages", "keeping standard output clean")


def local_options(temp_folder: str) -> dict[str, str]:
    """Options of `ray.init` that keep it on the loopback interface, with its files in this folder."""
    return {"_node_ip_address": "127.0.0.1", "_temp_dir": temp_folder}


def staying_on_loopback() -> AbstractContextManager[Any]:
    """Let Ray start no processes that listen on other interfaces than loopback."""
    return CLUSTER_SETTING.replacing(False)


def ending_processes_of_failed_starts() -> AbstractContextManager[Any]:
    """End the processes that Ray has started when its start fails. Ray would leave them running until this one ends."""
    node_class, kill_processes = NODE.resolve(), KILL_PROCESSES.resolve()

    class Node(node_class):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            try:
                super().__init__(*arguments, **options)
            except BaseException:
                kill_processes(self, check_alive=False, allow_graceful=True)
                raise

    return NODE.replacing(Node)


def muting_worker_errors() -> AbstractContextManager[Any]:
    """Stop Ray from printing dead workers to standard output; no option does, and headscope logs them itself."""
    return ERROR_LISTENER.replacing(lambda *_: None)


def dead_processes() -> set[str]:
    """Names of the processes of the Ray on this machine that ended; empty without one."""
    node = GLOBAL_NODE.resolve()
    return set() if node is None else {name for name, _ in DEAD_PROCESSES.of(node)()}
