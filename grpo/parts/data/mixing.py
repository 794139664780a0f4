"""Data sets mixed by weight: from which set the n-th prompt comes follows from n and the seed alone."""

import numpy as np
from numpy import ndarray

BLOCK = 100  # prompts; in each block the shares are exact to one prompt of each set
GOLDEN = (5**0.5 - 1) / 2  # its multiples, mod 1, cover [0, 1) evenly however few or many there are


def draw_sets(weights: list[float], taken, size, seed) -> list[tuple[int, int]]:
    """(set, number in its own stream) of the `size` prompts after the first `taken`. Weights need not sum to 1."""
    first = taken // BLOCK
    last = (taken + size - 1) // BLOCK
    counts = block_counts(weights, last + 1)
    next_number = counts[:first].sum(0)  # [sets]

    drawn = []
    for block in range(first, last + 1):
        sets = np.repeat(np.arange(len(weights)), counts[block])
        for chosen in np.random.default_rng([seed, block, 0, 1]).permutation(sets).tolist():
            drawn.append((chosen, int(next_number[chosen])))
            next_number[chosen] += 1

    start = taken - first * BLOCK
    return drawn[start : start + size]


def block_counts(weights: list[float], blocks) -> ndarray:
    """How many prompts each set has in each of the first blocks, [blocks, sets]. Each block has BLOCK prompts.

    Each set is an interval of [0, BLOCK], as long as its share. A set gets a prompt for every integer, shifted by u,
    that is in its interval. u differs from block to block, so that a share below 1 / BLOCK is met over many blocks.
    """
    edges = np.concatenate([[0], np.cumsum(weights) / np.sum(weights)])
    edges[-1] = 1
    shifts = (np.arange(blocks) * GOLDEN) % 1
    counts_below = np.ceil(BLOCK * edges - shifts[:, None])  # integers below each edge, [blocks, sets + 1]
    return np.diff(counts_below, axis=1).astype(np.int64)
