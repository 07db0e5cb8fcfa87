"""How much memory a process takes while something runs."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

MIB = 2**20


def private_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return sum(int(kib) for kib in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", status)) * 1024


def grown(function: Callable[[], None]) -> int:
    """The most private memory while ``function`` runs, above what there was before."""
    peak, before, stop = [0], private_bytes(), threading.Event()

    def watch() -> None:
        while not stop.wait(0.001):
            peak[0] = max(peak[0], private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    function()
    stop.set()
    watcher.join()
    return max(peak[0], private_bytes()) - before
