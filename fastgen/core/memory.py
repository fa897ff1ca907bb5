"""How much memory a device has to give."""

from __future__ import annotations

import psutil
import torch

__all__ = ["available_memory"]

_CGROUP_LIMIT, _CGROUP_USED = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"


def available_memory(device: torch.device) -> int:
    """Bytes free on a device; on a CPU within the limit of the process's control group, if there is one."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    try:
        with open(_CGROUP_LIMIT) as limit, open(_CGROUP_USED) as used:
            free = min(free, max(0, int(limit.read()) - int(used.read())))
    except (OSError, ValueError):  # no control group, or no limit ("max")
        pass
    return free
