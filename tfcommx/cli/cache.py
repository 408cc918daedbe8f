"""`tfcommx cache`: what the data cache keeps on this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tfcommx.terms import PlanError

if TYPE_CHECKING:
    from tfcommx.data.sources.base import Source

Memory = Annotated[Path, typer.Option(help="Folder of shared memory.")]
Disk = Annotated[Path | None, typer.Option(help="Folder of the local disk level.")]

app = typer.Typer(
    name="cache",
    no_args_is_help=True,
    help="Fill, list and remove what the data cache keeps on this machine.",
)


def _check_folders(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and not path.is_dir():
            what = f"{path} is no folder" if path.exists() else f"The folder {path} does not exist"
            raise PlanError(f"{what}. Check the path and its mount.")


def source_of(text: str, split: str) -> Source:
    """Return the samples of a folder of class folders, of a folder of ImageNet's shards, or of a
    TensorFlow data set by name.
    """
    from tfcommx.data.sources import folder, tfrecord

    path = Path(text)
    if text.startswith((os.sep, ".", "~")):
        _check_folders(path)
    elif not path.is_dir():  # names of data sets have a slash too, before the configuration
        return tfrecord.tfds(text, split)
    return (
        tfrecord.imagenet(path, split)
        if next(path.glob(f"{split}-*-of-*"), None)
        else folder.Folder(path)
    )


@app.command()
def warm(
    source: Annotated[
        str,
        typer.Argument(
            help="Folder of class folders or of TFRecord shards, or a TensorFlow data set's name."
        ),
    ],
    disk: Disk = None,
    store: Annotated[
        int | None,
        typer.Option(help="Short side at which images are kept, pixels; by default as they come."),
    ] = None,
    split: Annotated[str, typer.Option(help="Of shards and of TensorFlow data sets.")] = "train",
    memory: Memory = Path("/dev/shm"),
    hold: Annotated[
        bool,
        typer.Option(
            help="Keep the memory until interrupted: runs that start meanwhile find all in it."
        ),
    ] = False,
    seed: Annotated[
        int,
        typer.Option(
            help="Of the runs to come: it says which samples are whose, where there is more than "
            "one node."
        ),
    ] = 0,
) -> None:
    """Read every sample of a node once: into the disk level, and with --hold into memory.

    For several nodes launch it as the runs will be: `horovodrun -np 16 -H node1:8,node2:8 tfcommx
    cache warm SOURCE --hold`.
    """
    if disk is None and not hold:
        raise PlanError(
            "A place where the samples stay is required. Give --disk FOLDER, or --hold, or both."
        )
    import tempfile

    from rich.progress import track

    from tfcommx import init
    from tfcommx.data.cache.cache import DataCache
    from tfcommx.data.cache.options import Options

    samples, here = source_of(source, split), init()
    # it ends in order, and leaves no slab
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # without --hold the slab has no room, and no run shares it
    with tempfile.TemporaryDirectory() as nowhere:
        place = (
            dict(memory=str(memory)) if hold else dict(memory=nowhere, memory_bytes=1, partial=True)
        )
        options = Options(
            seed=seed, store=store, disk=str(disk) if disk else None, on_error="skip", **place
        )
        cache = DataCache(samples, here.topology, here.rank, options)
        try:
            for _ in track(
                cache.warming(), "reading", total=cache.warming_steps, disable=here.rank > 0
            ):
                pass
            for message in cache.filler.unreadable.values():
                typer.echo(message, err=True)
            read = here.gather_objects(
                (cache.node, len(cache.share(0)) - len(cache.filler.unreadable))
            )
            if cache.slot == 0:
                count = (
                    cache.slab.filled
                    if hold
                    else sum(part for node, part in read if node == cache.node)
                )
                where = f"in memory, {cache.slab.used_bytes:,} bytes decoded" if hold else "on disk"
                typer.echo(f"node {cache.node}: {count:,} of {samples.count:,} samples {where}")
            if hold:
                print("They stay in memory until this command is interrupted.", flush=True)
                signal.pause()
        except KeyboardInterrupt:
            pass
        finally:
            cache.close()


@app.command()
def status(memory: Memory = Path("/dev/shm"), disk: Disk = None) -> None:
    """List the slabs in memory and the data sets on the disk level."""
    from tfcommx.data.cache.disk import usage
    from tfcommx.data.cache.slab import SlabError, facts_of, state_of

    _check_folders(memory, disk)
    for path in sorted(memory.glob("tfcommx-*.slab")):
        try:
            count, filled, used, alive = state_of(path)
        except (OSError, SlabError) as error:
            typer.echo(f"{path}: {error}")
            continue
        typer.echo(
            f"{path}: {filled:,} of {count:,} samples, {used:,} bytes, "
            f"{'in use' if alive else 'left by a run that died'}; "
            + facts_of(path)
            .get("source", "an unknown source")
            .encode("utf-8", "backslashreplace")
            .decode()
        )
    for path, samples, size in usage(disk) if disk else ():
        typer.echo(f"{path}: {samples:,} samples, {size:,} bytes")


@app.command()
def drop(memory: Memory = Path("/dev/shm"), disk: Disk = None) -> None:
    """Remove the slabs that no living process uses, and all data sets of the disk level."""
    from tfcommx.data.cache import disk as level
    from tfcommx.data.cache.slab import reclaim

    _check_folders(memory, disk)  # before anything is removed
    for path in [*reclaim(memory), *(level.drop(disk) if disk else ())]:
        typer.echo(f"removed {path}")
