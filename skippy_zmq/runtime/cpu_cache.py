"""How much of the processor's cache some cores may count on, as Linux describes it under /sys."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")


def last_level_share(cores: Iterable[int], cpus: Path = _CPUS) -> int:
    """Bytes of the last level of cache for ``cores``: of each one that is shared, as much as for any other core.

    0 where the system does not say.
    """
    return sum(_share(cpus / f"cpu{core}" / "cache") for core in cores)


def _share(caches: Path) -> int:
    """Of one core. Files as in the kernel's Documentation/ABI/testing/sysfs-devices-system-cpu."""
    try:
        last = max(caches.glob("index*"), key=lambda index: int((index / "level").read_text()), default=None)
        if last is None:
            return 0
        n_kib = int((last / "size").read_text().strip().removesuffix("K"))
        return (n_kib << 10) // _count((last / "shared_cpu_list").read_text())
    except (OSError, ValueError):
        return 0


def _count(cpu_list: str) -> int:
    """Cores in a list like ``0-3,8``."""
    total = 0
    for part in cpu_list.strip().split(","):
        first, _, last = part.partition("-")
        total += int(last or first) - int(first) + 1
    return max(total, 1)
