"""Processes that are started anew meet in a store where those before them have left what they said."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from pipeline.errors import LinkError
from pipeline.links.rendezvous import new_name


def together(store: HashStore, size: int, *ranks: int, timeout: float = 20.0) -> list[str]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(lambda rank: new_name(store, rank, size, timeout), ranks))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_try_has_a_name_of_its_own(size: int) -> None:
    store = HashStore()
    names = [together(store, size, *range(size)) for _ in range(3)]
    assert all(len(set(of_try)) == 1 for of_try in names)
    assert len({of_try[0] for of_try in names}) == 3


@pytest.mark.parametrize("came", [[0], [1], [0, 1], [1, 2], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_what_a_try_has_left_that_failed_misleads_nobody(came: list[int], first: int) -> None:
    """Whoever had come then, and whoever comes first now."""
    store = HashStore()
    left = set()
    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(new_name, store, rank, 3, 0.05) for rank in came]:
            if done.exception() is None:
                left.add(done.result())
    with ThreadPoolExecutor(3) as threads:
        order = itertools.islice(itertools.cycle(range(3)), first, first + 3)
        names = {done.result() for done in [threads.submit(new_name, store, rank, 3, 20.0) for rank in order]}
    assert len(names) == 1
    assert not names & left


def test_a_rank_that_never_comes_is_named() -> None:
    with pytest.raises(LinkError, match=r"rank 1 has not come within 0.1 s"):
        together(HashStore(), 2, 0, timeout=0.1)
    with pytest.raises(LinkError, match=r"rank 0 has not come within 0.1 s"):
        together(HashStore(), 2, 1, timeout=0.1)
