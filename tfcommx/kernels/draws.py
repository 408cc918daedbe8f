"""Draws: random numbers as pure functions of integers, equal on every machine and in ops/kernels.

**Source:** the finaliser of splitmix64; Steele, Lea, Flood, Fast Splittable Pseudorandom Number
Generators, 2014.
"""

import numpy as np


def mix(x: np.ndarray) -> np.ndarray:
    """Hash uint64 values to uint64 values of the same shape, by splitmix64's finaliser."""
    x = x + np.uint64(0x9E3779B97F4A7C15)  # Wraps modulo 2^64
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def draws(*stream: int, of: np.ndarray) -> np.ndarray:
    """Return a uint64 for every entry of `of`, a pure function of `stream` and the entry.

    >>> draws(1, 2, of=np.arange(3)).tolist() == [int(draws(1, 2, of=i)[0]) for i in np.arange(3)]
    True
    """
    # Arrays, because NumPy warns if a scalar overflows, as these do by design
    state = np.zeros(1, np.uint64)
    for number in stream:
        # Modulo 2^64, because NumPy refuses negative numbers, such as seeds, as uint64
        state = mix(state + np.array([number % 2**64], np.uint64))
    return mix(state + of.astype(np.uint64))


def uniform(seed: int, epoch: int, sample: int, draw: int) -> float:
    """Return draw number `draw` of the stream of (seed, epoch, sample), a float in [0, 1)."""
    # The upper 53 bits, which a float holds exactly: rounding would make 1.0 of the largest draws
    return int(draws(seed, epoch, sample, of=np.array([draw]))[0] >> np.uint64(11)) * 2.0**-53
