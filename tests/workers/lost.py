"""A recipe's parts for test_supervised_recipes.py: the first generation is killed, by LOST.

LOST=step: in the fifth step, before anything has been saved; LOST=close: behind the last save.
"""

from __future__ import annotations

import os
import signal

import keras
import numpy as np
import paced

from tfcommx.recipes.families import Data, DataRank


def die(where: str) -> None:
    """Kill this rank if it is to be lost there, and is the first generation's."""
    if os.environ.get("LOST") == where and os.environ.get("TFCOMMX_GENERATION") == "0":
        os.kill(os.getpid(), signal.SIGKILL)


class Steps(paced.Pace):
    """Counts steps, and dies in the fifth one."""

    taken = 0

    def wait(self, inputs: np.ndarray) -> np.ndarray:
        self.taken += 1
        if self.taken == 5:
            die("step")
        return inputs


def build_net(inputs: int, outputs: int) -> keras.Model:
    """Build a network without hidden layers."""
    pictures = keras.Input((None, None, inputs))
    flow = keras.layers.GlobalMaxPooling2D()(Steps()(pictures))
    return keras.Model(pictures, keras.layers.Dense(outputs)(flow))


def open_noise(place: DataRank, count: int = 128) -> Data:
    """Open the data of paced.py, which is closed behind the last save."""
    data = paced.open_noise(place, count)
    close = data.close

    def close_or_die() -> None:
        die("close")
        close()

    data.close = close_or_die
    return data
