"""Pictures, open on one rank: two data caches, one for training and one for evaluation."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfcommx.comm.base import Comm
from tfcommx.data.cache.cache import DataCache
from tfcommx.data.sources.base import Source
from tfcommx.recipes.base import Place
from tfcommx.recipes.datasets.cached import Cached
from tfcommx.terms import PlanError

# Changes a batch of pictures [b, h, w, c]; the seed is an integer [2], its own for every (epoch,
# step, rank); the resolution is in pixels
Vary = Callable[[tf.Tensor, tf.Tensor, int], tf.Tensor]


class Pictures:
    """Training and test pictures, served from the node's memory.

    Args:
        settings: how they are kept and served.
        train: source of the training pictures.
        test: source of the test pictures, with the same channels.
        place: the ranks, and which of them this is.
        vary: changes the training batches further; None: nothing does.
        classes: their names; empty: as the source names them.

    **Ranks:** every rank makes one; none waits for another.
    **Raises:** PlanError if the sources differ in channels, or their classes have other names.
    """

    def __init__(
        self,
        settings: Cached,
        train: Source,
        test: Source,
        place: Place,
        vary: Vary | None = None,
        classes: tuple[str, ...] = (),
    ) -> None:
        _check_alike(train, test)
        self.settings, self.place, self.vary = settings, place, vary
        self.inputs, self.count = train.channels, train.count
        self.classes = tuple(classes or train.classes)
        _check_named(self.classes, train)
        self.redistributes = settings.reshuffle_fraction > 0
        self.cache = self._open(train, settings.reshuffle_fraction)
        self.test_cache = self._open(test, 0.0)

    def _open(self, source: Source, reshuffle_fraction: float) -> DataCache:
        settings, place = self.settings, self.place
        return DataCache(
            source,
            topology=place.topology,
            rank=place.rank,
            seed=place.seed,
            memory=settings.memory,
            store=settings.store,
            disk=settings.disk,
            on_error=settings.on_error,
            # Samples that find no room in memory can still be read from the source
            partial=True,
            reshuffle_fraction=reshuffle_fraction,
            threads=place.threads,
        )

    def steps(self, batch: int, resolution: int) -> int:
        """Return the steps of an epoch, the same on every rank."""
        return self.cache.steps(self.settings.serving(batch, resolution, self.inputs))

    def train(self, batch: int, resolution: int, epochs: range, step: int = 0) -> tf.data.Dataset:
        """Return the training batches of some epochs.

        Returns:
            (pictures settings.dtype [batch, h, w, c], labels int64 [batch]), one for every step.
        """
        spec = self.settings.serving(batch, resolution, self.inputs)
        batches = self.cache.dataset(spec, epochs.start, len(epochs), step)
        if self.vary is not None:
            batches = self._varied(
                batches, resolution, epochs.start * self.cache.steps(spec) + step
            )
        options = tf.data.Options()
        # The pipeline must not take the cores of the other ranks' training
        if self.place.threads:
            options.threading.private_threadpool_size = self.place.threads
        return batches.with_options(options)

    def _varied(self, batches: tf.data.Dataset, resolution: int, first: int) -> tf.data.Dataset:
        """Vary each batch with a seed of its own; `first` counts the steps over the whole run."""
        place, vary = self.place, self.vary

        def finish(
            number: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]
        ) -> tuple[tf.Tensor, tf.Tensor]:
            pictures, labels = batch
            seed = tf.stack([place.seed, number * place.topology.size + place.rank])
            return vary(pictures, seed, resolution), labels

        calls = self.place.threads or 2
        return batches.enumerate(first).map(finish, num_parallel_calls=calls, deterministic=True)

    def test(self, batch: int, resolution: int) -> tf.data.Dataset:
        """Return this rank's own part of the test pictures, each once, with their labels."""
        return self.test_cache.dataset(self.settings.test_serving(batch, resolution, self.inputs))

    def redistribute(self, epoch: int, comm: Comm) -> None:
        """Bring the pictures that are new on this node in an epoch. **Ranks:** all."""
        self.cache.reshuffle(epoch, comm)

    def report(self, epoch: int) -> dict[str, float]:
        """Return what the data cache saw of the training pictures in an epoch."""
        return self.cache.report(epoch)

    def close(self) -> None:
        """Give the memory back."""
        self.cache.close()
        self.test_cache.close()


def _check_alike(train: Source, test: Source) -> None:
    """Refuse test pictures that the network cannot be tested on."""
    if train.channels != test.channels:
        raise PlanError(
            f"Test pictures need as many channels as training pictures. {test.name} has "
            f"{test.channels}, {train.name} {train.channels}. Convert one of them."
        )
    if train.classes and test.classes and tuple(train.classes) != tuple(test.classes):
        differ = sorted(set(train.classes) ^ set(test.classes)) or ["their order"]
        raise PlanError(
            f"Test pictures need the classes of the training pictures. {test.name} and "
            f"{train.name} differ in {', '.join(map(str, differ[:5]))}. Give both the same class "
            "folders."
        )


def _check_named(classes: tuple[str, ...], source: Source) -> None:
    """Refuse a source of which nobody knows how many classes there are."""
    if not classes:
        raise PlanError(
            f"The names of the classes are required. {source.name} has none. Give them, or class "
            "folders."
        )
