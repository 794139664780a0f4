"""Which prompt comes next: endless streams of shuffled sets, mixed by weight. Pure functions of the numbers given.

The n-th prompt of a run follows from n and the seed alone, so ranks agree and a resumed run goes on where it was.
"""

import numpy as np
from numpy import ndarray

BLOCK = 100  # prompts in which the shares hold to one prompt of each set
GOLDEN = (5**0.5 - 1) / 2  # its multiples, mod 1, fill [0, 1) evenly however few or many there are


def places(sizes: list[int], weights: list[float], taken: int, size: int, seed: int) -> list[tuple[int, int]]:
    """(set, place in it) of the `size` prompts after the first `taken`.

    Each set is an endless stream that is shuffled anew each time it has been passed; `weights` are the sets' shares,
    up to a factor.
    """
    orders: dict[tuple[int, int], ndarray] = {}
    found = []
    for chosen, number in draws(weights, taken, size, seed):
        epoch, place = divmod(number, sizes[chosen])
        if (chosen, epoch) not in orders:
            orders[chosen, epoch] = np.random.default_rng([seed, epoch, chosen]).permutation(sizes[chosen])
        found.append((chosen, int(orders[chosen, epoch][place])))
    return found


def draws(weights: list[float], taken: int, size: int, seed: int) -> list[tuple[int, int]]:
    """(set, which prompt of its own stream) of the same prompts."""
    first, last = taken // BLOCK, (taken + size - 1) // BLOCK
    counts = block_counts(weights, last + 1)
    sets = np.concatenate([
        np.random.default_rng([seed, block, 0, 1]).permutation(np.repeat(np.arange(len(weights)), counts[block]))
        for block in range(first, last + 1)
    ])  # fmt: skip
    numbers = np.zeros(len(sets), np.int64)
    for chosen, before in enumerate(counts[:first].sum(0)):
        mine = sets == chosen
        numbers[mine] = before + np.arange(mine.sum())
    window = slice(taken - first * BLOCK, taken - first * BLOCK + size)
    return list(zip(sets[window].tolist(), numbers[window].tolist(), strict=True))


def block_counts(weights: list[float], blocks: int) -> ndarray:
    """How many prompts each set has in each of the first blocks, [blocks, sets]; BLOCK in all.

    The sets lie side by side on [0, BLOCK], as long as their shares, and every whole number shifted by -u belongs to
    the set it falls on; u moves from block to block, so that a share below 1 / BLOCK comes to its due as well.
    """
    edges = np.concatenate([[0], np.cumsum(weights) / np.sum(weights)])
    edges[-1] = 1
    shifts = (np.arange(blocks) * GOLDEN) % 1
    return np.diff(np.ceil(BLOCK * edges - shifts[:, None]), axis=1).astype(np.int64)
