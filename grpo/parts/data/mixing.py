"""The order of prompts: endless shuffled data sets, mixed by weight. The n-th follows from n and the seed alone."""

import numpy as np
from numpy import ndarray

BLOCK = 100  # prompts; in each block the shares are exact to one prompt of each set
GOLDEN = (5**0.5 - 1) / 2  # its multiples, mod 1, cover [0, 1) evenly however few or many there are


def draw_sets(weights: list[float], taken: int, size: int, seed: int) -> list[tuple[int, int]]:
    """(set, number in its own stream) of the `size` prompts after the first `taken`; `weights` need not sum to 1."""
    first = taken // BLOCK
    last = (taken + size - 1) // BLOCK
    counts = block_counts(weights, last + 1)
    blocks = [
        np.random.default_rng([seed, block, 0, 1]).permutation(np.repeat(np.arange(len(weights)), counts[block]))
        for block in range(first, last + 1)
    ]
    sets = np.concatenate(blocks)
    numbers = np.zeros(len(sets), np.int64)
    drawn_before = counts[:first].sum(0)  # [sets]
    for chosen, before in enumerate(drawn_before):
        mine = sets == chosen
        numbers[mine] = before + np.arange(mine.sum())
    start = taken - first * BLOCK
    window = slice(start, start + size)
    return list(zip(sets[window].tolist(), numbers[window].tolist(), strict=True))


def block_counts(weights: list[float], blocks: int) -> ndarray:
    """How many prompts each set has in each of the first blocks, [blocks, sets]; BLOCK in all.

    Each set is an interval of [0, BLOCK], as long as its share. A set gets a prompt for every integer, shifted by u,
    that is in its interval. u differs from block to block, so that a share below 1 / BLOCK is met over many blocks.
    """
    edges = np.concatenate([[0], np.cumsum(weights) / np.sum(weights)])
    edges[-1] = 1
    shifts = (np.arange(blocks) * GOLDEN) % 1
    counts_below = np.ceil(BLOCK * edges - shifts[:, None])  # integers below each edge, [blocks, sets + 1]
    return np.diff(counts_below, axis=1).astype(np.int64)
