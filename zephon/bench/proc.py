"""What /proc knows of a tree of processes: who is in it, what CPU it used, how much memory it holds. Linux only."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_PARENT, _UTIME, _STIME, _STARTED = 1, 11, 12, 19  # fields of /proc/PID/stat behind the name, from 0
ENGINE_THREAD = "zephon-engine"


def has_proc() -> bool:
    """Whether this platform has what this module reads."""
    return Path("/proc/self/smaps_rollup").exists()


def _stat(path: Path) -> list[str] | None:
    try:
        return path.read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None


def descendants(root: int) -> dict[int, int]:
    """{pid: parent's pid} of all processes below `root`, in the order in which they were started."""
    stats = {int(p.name): stat for p in Path("/proc").glob("[0-9]*") if (stat := _stat(p / "stat")) is not None}
    children = defaultdict(list)
    for pid, stat in stats.items():
        children[int(stat[_PARENT])].append(pid)
    found: dict[int, int] = {}
    waiting = [root]
    while waiting:
        parent = waiting.pop()
        for pid in children[parent]:
            found[pid] = parent
            waiting.append(pid)
    return dict(sorted(found.items(), key=lambda item: (int(stats[item[0]][_STARTED]), item[0])))


def kinds(root: int, system: str) -> dict[int, str]:
    """{pid: kind} of a tree: trainer, launcher, engine, worker. Zephon's launcher forks the engine first of all."""
    tree = descendants(root)
    named = {root: "trainer"}
    if system != "zephon":
        return named | dict.fromkeys(tree, "worker")
    launchers = [pid for pid, parent in tree.items() if parent == root]
    named |= dict.fromkeys(launchers, "launcher")
    for launcher in launchers:
        below = [pid for pid, parent in tree.items() if parent == launcher]
        named |= dict.fromkeys(below, "worker")
        named |= dict.fromkeys(below[:1], "engine")
    return named


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, all threads; 0 where it is gone. In steps of 10 ms."""
    return _cpu(Path(f"/proc/{pid}/stat"))


def _cpu(path: Path) -> float:
    stat = _stat(path)
    return (int(stat[_UTIME]) + int(stat[_STIME])) / _TICKS_PER_S if stat else 0.0


def cpu_by_kind(root: int, system: str) -> dict[str, float]:
    """CPU seconds so far by kind of process. Where the engine is a thread of the trainer, its part is told apart."""
    used: dict[str, float] = defaultdict(float)
    for pid, kind in kinds(root, system).items():
        used[kind] += cpu_s(pid)
    if system == "zephon" and root == os.getpid() and (thread := _engine_thread()) is not None:
        used["engine"] = _cpu(Path(f"/proc/self/task/{thread}/stat"))
        used["trainer"] -= used["engine"]
    return dict(used)


def _engine_thread() -> int | None:
    return next((t.native_id for t in threading.enumerate() if t.name == ENGINE_THREAD), None)


def machine_cpu_s() -> float:
    """CPU seconds that all programs of the machine used so far."""
    fields = [int(number) for number in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _, _, interrupts, soft, _ = fields
    return (user + nice + system + interrupts + soft) / _TICKS_PER_S


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process: what it alone has, and its share of what it shares. 0 where it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def tree_pss_mb(root: int) -> float:
    """Proportional set size of a process and all below it, in MB (10^6 bytes)."""
    return sum(map(pss_bytes, [root, *descendants(root)])) / 1e6


def tree_pss_by_kind(root: int, system: str) -> dict[str, float]:
    """The same by kind of process."""
    total: dict[str, float] = defaultdict(float)
    for pid, kind in kinds(root, system).items():
        total[kind] += pss_bytes(pid) / 1e6
    return dict(total)


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    stat = _stat(Path(f"/proc/{pid}/stat"))
    return stat is not None and stat[0] not in ("Z", "X")


def shared_names() -> set[str]:
    """Names in /dev/shm."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
