"""Records of jrnn with those of lax.scan."""

from __future__ import annotations

from collections.abc import Iterable

from jrnn.bench.results import Record


def pairs_of(records: Iterable[Record], mode: str) -> list[tuple[Record, Record]]:
    """Returns the records of jrnn in a mode with those of lax.scan for the same jobs."""
    of_peers = {(r.job, r.peer): r for r in records if r.mode == mode}
    ours = [
        (r, of_peers.get((job, "lax.scan")))
        for (job, peer), r in of_peers.items()
        if peer == "jrnn"
    ]
    return [(r, reference) for r, reference in ours if reference is not None]
