"""Shares GPU memory that every rank of a group maps. File descriptors travel between processes over Unix sockets."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from oxmoe.allreduce.mailbox import Card, Mailbox

# Exchanges one line of text with the group. It raises if some rank has failed; `error` is this rank's failure.
Round = Callable[[Exception | None, str], list[str]]


def share(make: Callable[[], Any], exchange: Round, rank: int, end: float) -> Any:
    """Returns this rank's memory (`make` allocates it), with every peer's memory mapped into this process. The call
    is collective.

    When it returns, every rank has emptied its own memory and mapped all others'. If one rank fails, it raises on
    all ranks. `exchange` is trusted to keep what it carries inside the group, because it carries the secrets of the
    mailboxes.
    """
    memory = box = None
    descriptors: dict[int, int] = {}
    try:
        error: Exception | None = None
        try:
            memory, box = make(), Mailbox()
        except Exception as failure:
            error = failure
        # Peers must learn a mailbox's name only after the mailbox exists.
        texts = exchange(error, "" if box is None else box.card.text())
        assert memory is not None and box is not None
        try:
            cards = [Card.parse(peer, text) for peer, text in enumerate(texts)]
            if cards[rank] != box.card:
                raise RuntimeError(f"rank {rank}: the group gave another rank's text for its own; are ranks in order?")
            box.swap(cards, rank, memory.descriptor(), descriptors, end)
            memory.open([descriptors.get(peer, -1) for peer in range(len(cards))])
        except Exception as failure:
            error = failure
        exchange(error, "")
    except BaseException:
        if memory is not None:
            memory.close()
        raise
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
        if box is not None:
            box.close()
    return memory
