"""`tfcommx cache`: fill, list and remove the contents of the data cache on this machine."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import track

from tfcommx.cli.environment import load_tensorflow
from tfcommx.cli.parameters import Command
from tfcommx.core import ConfigurationError, local_path
from tfcommx.data import disk as level
from tfcommx.data.slab_files import SlabError, paths, read_metadata, remove_unused, slab_state
from tfcommx.data.sources import find_source
from tfcommx.data.sources.folder import check_folder

if TYPE_CHECKING:
    from tfcommx.collectives.comm import Comm
    from tfcommx.data.cache import DataCache

Memory = Annotated[Path, typer.Option(help="Folder of shared memory.")]
Disk = Annotated[Path | None, typer.Option(help="Folder of the local disk level.")]

app = typer.Typer(
    name="cache",
    no_args_is_help=True,
    help="Fill, list and remove the contents of the data cache on this machine.",
)


@app.command(cls=Command)
def warm(
    source: Annotated[
        str,
        typer.Argument(
            help="Folder of class folders or of TFRecord shards, or a TensorFlow data set's name."
        ),
    ],
    disk: Disk = None,
    store: Annotated[
        int | None, typer.Option(help="Short side of stored images, pixels; default: unchanged.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of shards, or of a TensorFlow set.")] = "train",
    memory: Memory = Path("/dev/shm"),
    hold: Annotated[
        bool,
        typer.Option(
            help="Keep the memory until interrupted; runs that start meanwhile find all samples."
        ),
    ] = False,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the later runs; with several nodes it selects the samples of each node."
        ),
    ] = 0,
) -> None:
    """Read every sample of a node once: into the disk level, and with --hold into memory.

    For several nodes launch it like the later runs: `horovodrun -np 16 -H node1:8,node2:8 tfcommx
    cache warm SOURCE --hold`.
    """
    if disk is None and not hold:
        raise ConfigurationError(
            "A level that keeps the samples is required. Give --disk FOLDER, or --hold, or both."
        )
    load_tensorflow()
    from tfcommx import init
    from tfcommx.data.cache import DataCache

    samples, comm = find_source(source, split), init()
    # Because the process must end normally to remove its slab
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as nowhere:
        # Without --hold a private slab of one byte, because the disk level keeps the samples
        no_room = dict(memory=nowhere, memory_bytes=1, partial=True)
        room: dict[str, Any] = dict(memory=memory) if hold else no_room
        # An unreadable sample is listed at the end, and must not keep the others from being read
        cache = DataCache(samples, seed=seed, store=store, disk=disk, on_error="skip", **room)
        try:
            _fill(cache, comm, hold)
            if hold:
                print("They stay in memory until this command is interrupted.", flush=True)
                signal.pause()
        # An interruption is the usual end of --hold
        except KeyboardInterrupt:
            pass
        finally:
            cache.close()


def _fill(cache: DataCache, comm: Comm, hold: bool) -> None:
    """Load this rank's samples; print the number of samples of each node."""
    steps = cache.warming_steps
    for _ in track(cache.warming(), "reading", total=steps, disable=comm.rank > 0):
        pass
    unreadable = cache.filler.unreadable
    for message in unreadable.values():
        typer.echo(message, err=True)
    comm.gather_objects("filled")  # The other ranks of this node have filled their parts
    if cache.slot > 0:
        return
    if hold:
        count = cache.slab.filled
        where = f"in memory, {cache.slab.used_bytes:,} bytes decoded"
    else:
        assert cache.options.disk is not None, "`warm` has checked it"
        # Counted anew, because a full disk takes fewer than were read
        count = len(level.Disk(cache.options.disk, cache.source.key, cache.source.count))
        where = "on disk"
    typer.echo(f"node {cache.node}: {count:,} of {cache.source.count:,} samples {where}")


@app.command(cls=Command)
def status(memory: Memory = Path("/dev/shm"), disk: Disk = None) -> None:
    """List this user's slabs in memory and data sets on the disk level."""
    memory, disk = _folder(memory), None if disk is None else _folder(disk)
    for path in paths(memory):
        try:
            count, filled, used, alive = slab_state(path)
        except (OSError, SlabError) as error:
            typer.echo(f"{path}: {error}")
            continue
        source = read_metadata(path).get("source", "an unknown source")
        # A folder's name may have bytes that are not UTF-8, which cannot be printed
        typer.echo(
            f"{path}: {filled:,} of {count:,} samples, {used:,} bytes, "
            f"{'in use' if alive else 'of a run that died'}; "
            + source.encode("utf-8", "backslashreplace").decode()
        )
    for path, samples, size in level.usage(disk) if disk else ():
        typer.echo(f"{path}: {samples:,} samples, {size:,} bytes")


@app.command(cls=Command)
def drop(memory: Memory = Path("/dev/shm"), disk: Disk = None) -> None:
    """Remove this user's slabs that no process uses, and data sets of the disk level."""
    # Before anything is removed
    memory, disk = _folder(memory), None if disk is None else _folder(disk)
    for path in [*remove_unused(memory), *(level.drop(disk) if disk else ())]:
        typer.echo(f"removed {path}")


def _folder(path: Path) -> Path:
    """Return a path, with its `~` expanded. **Raises:** DataError if it is no folder."""
    expanded = local_path("folder", path)
    check_folder(expanded)
    return expanded
