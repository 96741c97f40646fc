"""The peak of this process's resident memory.

`getrusage` is not used on Linux: its maximum survives exec, so that a child process starts with the peak of its parent.
"""

import ctypes
import resource
import sys
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CAN_RESET_PEAK = _CLEAR.exists()
"""Whether the peak of one piece of work can be measured (Linux)."""


def peak_bytes() -> float:
    """Peak resident memory since the start of this program, or since `reset_peak` on Linux, in bytes."""
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return float(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def reset_peak() -> None:
    """Return freed memory to the system and set the peak to the present memory (Linux; no effect elsewhere)."""
    if CAN_RESET_PEAK:
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR.write_text("5")
