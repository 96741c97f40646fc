"""Memory that is free for weights: a GPU's, or the machine's as far as this process may use it."""

from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

GROUPS = Path("/sys/fs/cgroup")
"""Where Linux shows control groups (version 2), by which containers and Slurm jobs are limited."""
MEMBERSHIP = Path("/proc/self/cgroup")


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free there; None where nobody tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    return min([int(psutil.virtual_memory().available), *_left_by_groups()])


def _left_by_groups() -> list[int]:
    """What this process's control group, and each that it lies in, leave of their limits.

    Files that were read and can be read again count as used there; they give way, so they are taken off.
    """
    lines = MEMBERSHIP.read_text().splitlines() if MEMBERSHIP.is_file() else []
    left = []
    for own in (line.removeprefix("0::/") for line in lines if line.startswith("0::/")):
        folder = GROUPS / own
        for group in (folder, *folder.parents):
            limit = group / "memory.max"
            if limit.is_file() and (most := limit.read_text().strip()) != "max":
                told = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / "memory.current").read_text()) - int(told["inactive_file"])
                left.append(max(int(most) - used, 0))
    return left
