"""Adds the counts of `oxmoe.stats` to the metrics of a server that has --enable-metrics.

Each of SGLang's processes keeps the counters of prometheus_client in files of one folder, which SGLang names in the
environment before it starts them. The server's /metrics adds up these files. They hold what a counter was told, and no
process is asked when a page is read. So a thread adds, every few seconds, what was counted since it last looked.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

import oxmoe

PERIOD = 5.0
"""Seconds between two looks at the counts."""

_exporters: list[Exporter] = []


class Exporter:
    """The counters of one process. Their label `rank` is its rank in the server's world."""

    def __init__(self, rank: int) -> None:
        # SGLang's processes must not import prometheus_client earlier: it looks for the folder when it is imported.
        from prometheus_client import Counter

        self._rank = str(rank)
        self._counters = {
            "calls": Counter("oxmoe_calls", "Calls of an oxmoe function that returned.", ["function", "rank"]),
            "rows": Counter("oxmoe_rows", "Rows of these calls.", ["function", "rank"]),
            "launches": Counter("oxmoe_launches", "Launches of an oxmoe kernel.", ["kernel", "rank"]),
        }
        self._seen: dict[tuple[str, str], int] = {}

    def add(self) -> None:
        """Adds what was counted since the last call."""
        stats: dict[str, Any] = oxmoe.stats()
        counts = {("launches", kernel): count for kernel, count in stats["launches"].items()}
        for function, of_function in stats["calls"].items():
            counts.update({(kind, function): count for kind, count in of_function.items()})
        for (kind, name), count in counts.items():
            seen = self._seen.get((kind, name), 0)
            # A count below the last one means that somebody has reset the counts.
            self._counters[kind].labels(name, self._rank).inc(count - seen if count >= seen else count)
        self._seen = counts

    def _run(self) -> None:
        wait = threading.Event().wait
        while not wait(PERIOD):
            self.add()

    def run(self) -> None:
        """Starts the thread, which ends with the process."""
        self.add()
        threading.Thread(target=self._run, name="oxmoe metrics", daemon=True).start()


def start() -> None:
    """Exports this process's counts from now on. A second call does nothing."""
    if _exporters:
        return
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    _exporters.append(Exporter(torch.distributed.get_rank() if ranks else 0))
    _exporters[0].run()
