"""Where processes meet before they have a process group: in a store that holds nothing of an earlier try."""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pipeline.errors import LinkError

__all__ = ["Meeting", "meet", "new_name", "shared_store"]

_OFFER = "pipeloom/offer"

Meeting = tuple[Store, int, int]
"""A store that only these processes use, the rank of this one, and how many there are."""


def shared_store() -> bool:
    """Whether the launcher keeps the store, and with it what processes left there that it has started anew since."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet(timeout: float) -> Meeting:
    """Agree on a part of the launcher's store that no earlier try has used.  Collective over all processes.

    torchrun restarts processes with the store of those that failed, where gloo finds their addresses and tries to
    connect to them.

    Raises ``LinkError`` when some rank does not come in time.
    """
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    return PrefixStore(f"pipeloom/{new_name(store, rank, size, timeout)}", store), rank, size


def new_name(store: Store, rank: int, size: int, timeout: float) -> str:
    """The same on every rank, whatever others have left in the store.  Collective.

    Rank 0 offers it, and answers everyone who takes it by what they said.
    """
    mine = secrets.token_hex(8)
    if rank == 0:
        store.set(_OFFER, mine)
        for peer in range(1, size):
            _answer(store, f"pipeloom/{mine}/{peer}", peer, timeout)
        return mine
    return _take(store, rank, mine, timeout)


def _answer(store: Store, place: str, peer: int, timeout: float) -> None:
    try:
        store.wait([place], timedelta(seconds=timeout))
    except DistStoreError as error:
        raise LinkError(f"rank {peer} has not come within {timeout:g} s; its own output says why") from error
    store.set(f"{place}/go", store.get(place).decode())


def _take(store: Store, rank: int, mine: str, timeout: float) -> str:
    """The offer that rank 0 of this try has made; one of an earlier try is never answered by what this rank says."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if store.check([_OFFER]):
            offer: str = store.get(_OFFER).decode()
            place = f"pipeloom/{offer}/{rank}"
            store.set(place, mine)
            if store.check([f"{place}/go"]) and store.get(f"{place}/go").decode() == mine:
                return offer
        time.sleep(0.005)
    raise LinkError(f"rank 0 has not come within {timeout:g} s; its own output says why")
