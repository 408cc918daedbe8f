"""Pictures, open on one rank: a data cache for training and one for evaluation."""

from collections.abc import Callable

import tensorflow as tf

from tfcommx.collectives.comm import Comm
from tfcommx.core import DataError, told_apart
from tfcommx.data.cache import DataCache
from tfcommx.data.sources.folder import Folder, listed_names
from tfcommx.data.sources.source import Source
from tfcommx.recipes.datasets.picture_dataset import PictureDataset
from tfcommx.recipes.families import DataRank

# Augmentation of a batch of pictures [b, h, w, c]: (batch, seed, resolution in pixels) -> batch.
# The seed is an integer [2] that differs for every epoch, step and rank
Augment = Callable[[tf.Tensor, tf.Tensor, int], tf.Tensor]


class Pictures:
    """Training and test pictures, served from the node's memory.

    Args:
        test: source of the test pictures, with the same channels.
        augment: further augmentation of the training batches; None: no further one.

    **Ranks:** every rank creates one; none waits for another.
    **Raises:** DataError if the sources differ in channels, or their classes have other names.
    """

    def __init__(
        self,
        settings: PictureDataset,
        train: Source,
        test: Source,
        place: DataRank,
        augment: Augment | None = None,
    ) -> None:
        self.settings, self.place, self.augment = settings, place, augment
        self.inputs, self.count = train.channels, train.count
        self.classes = tuple(train.classes)
        _check_sources(train, test)
        if place.rank == 0:
            # Printed for folders only, because their files decide the classes
            for source in (source for source in (train, test) if isinstance(source, Folder)):
                print(
                    f"{source.name}: {source.count:,} pictures in {len(self.classes):,} classes: "
                    + listed_names(self.classes),
                    flush=True,
                )
        self.redistributes = settings.reshuffle_fraction > 0
        self.cache = self._open(train, settings.reshuffle_fraction)
        self.test_cache = self._open(test, 0.0)

    def _open(self, source: Source, reshuffle_fraction: float) -> DataCache:
        names = ("memory", "store", "max_pixels", "disk", "on_error")
        return DataCache(
            source,
            **vars(self.place),
            **{name: getattr(self.settings, name) for name in names},
            # Samples that do not fit into memory are read from the source in each epoch
            partial=True,
            reshuffle_fraction=reshuffle_fraction,
        )

    def steps(self, batch: int, resolution: int) -> int:
        return self.cache.steps(self.settings.train_spec(batch, resolution, self.inputs))

    def train(self, batch: int, resolution: int, epochs: range, step: int = 0) -> tf.data.Dataset:
        """Return batches (pictures settings.dtype [batch, h, w, c], labels int64 [batch])."""
        spec = self.settings.train_spec(batch, resolution, self.inputs)
        batches = self.cache.dataset(spec, epochs.start, len(epochs), step)
        if self.augment is not None:
            first = epochs.start * self.cache.steps(spec) + step
            batches = self._augmented(batches, self.augment, resolution, first)
        options = tf.data.Options()
        # A private pool, because the pipeline must not use the cores of other ranks' training
        if self.place.threads:
            options.threading.private_threadpool_size = self.place.threads
        return batches.with_options(options)

    def _augmented(
        self, batches: tf.data.Dataset, augment: Augment, resolution: int, first: int
    ) -> tf.data.Dataset:
        """Augment each batch with its own seed; the first batch is step `first` of the run."""
        place = self.place

        @tf.autograph.experimental.do_not_convert
        def finish(
            number: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]
        ) -> tuple[tf.Tensor, tf.Tensor]:
            pictures, labels = batch
            # Another seed for each rank and step, because batches must not all be augmented alike
            seed = tf.stack([place.seed, number * place.topology.size + place.rank])
            return augment(pictures, seed, resolution), labels

        calls = place.threads or 2
        # Deterministic, because a resumed run must have the same batch in each step
        return batches.enumerate(first).map(finish, num_parallel_calls=calls, deterministic=True)

    def test(self, batch: int, resolution: int) -> tf.data.Dataset:
        return self.test_cache.dataset(self.settings.test_spec(batch, resolution, self.inputs))

    def redistribute(self, epoch: int, comm: Comm) -> None:
        self.cache.reshuffle(epoch, comm)

    def report(self, epoch: int) -> dict[str, float]:
        return self.cache.report(epoch)

    def close(self) -> None:
        self.cache.close()
        self.test_cache.close()


def _check_sources(train: Source, test: Source) -> None:
    """Refuse test pictures of other channels or classes, and classes without names."""
    if train.channels != test.channels:
        raise DataError(
            f"Test pictures need as many channels as training pictures. {test.name} has "
            f"{test.channels}, {train.name} {train.channels}. Convert one of them."
        )
    if train.classes and test.classes and tuple(train.classes) != tuple(test.classes):
        differ = sorted(set(train.classes) ^ set(test.classes)) or ["their order"]
        names = list(map(str, differ))
        raise DataError(
            f"Test pictures need the classes of the training pictures. {test.name} and "
            f"{train.name} differ in {', '.join(names[:5])}.{told_apart(names)} "
            "Give both the same class folders."
        )
    if not train.classes:
        raise DataError(
            f"The names of the classes are required. {train.name} has none. Give them, or class "
            "folders."
        )


def shifted(images: tf.Tensor, seed: tf.Tensor, most: int) -> tf.Tensor:
    """Shift a batch of pictures [n, h, w, c] by up to `most` pixels each way, around the edges.

    The shift is a function of the seed, an integer [2].
    """
    # One shift for the whole batch, because a gather per picture would cost as much as the training
    # step of a network this small
    return tf.roll(
        images, tf.random.stateless_uniform([2], seed, -most, most + 1, tf.int32), axis=[1, 2]
    )
