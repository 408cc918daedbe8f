"""Download and unpack Debian packages, without root and without installing them."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from tfcommx.core import DataError
from tfcommx.launch.commands import run_to_end

# Time limit of one download command, in seconds
DOWNLOAD_SECONDS = 120


def unpack(packages: Sequence[str], work: Path) -> Path:
    """Download packages, and unpack them in the empty folder `work`; return the folder of files.

    The machine's package lists are tried first, then newly downloaded ones.

    **Raises:** DataError if a download or an unpacking fails.
    """
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise DataError(f"{tool} is not on this machine")
    lists, cache, unpacked = work / "lists", work / "cache", work / "unpacked"
    for needed in (lists / "partial", cache / "archives" / "partial"):
        needed.mkdir(parents=True)
    private = ["-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}"]
    # No sandbox, because as root apt would download as the user _apt, who cannot write here
    download = ["apt-get", "-q", "-o", "APT::Sandbox::User=root"]
    try:
        # By the machine's lists first, because an update downloads all of them
        run([*download, "download", *packages], work)
    except DataError:
        run([*download, *private, "update"], work)
        run([*download, *private, "download", *packages], work)
    for package in packages:
        archives = list(work.glob(f"{package}_*.deb"))
        if not archives:
            raise DataError(f"apt-get downloaded no {package}_*.deb")
        # Unpacked and not installed, because that needs root
        run(["dpkg", "-x", str(archives[0]), str(unpacked)], work)
    return unpacked


def run(command: Sequence[str], folder: Path) -> str:
    """Run a command in `folder`; return its output. **Raises:** DataError with its last line."""
    done = run_to_end(command, DOWNLOAD_SECONDS, folder=folder)
    if done.late:
        raise DataError(f"`{command[0]}` took more than {DOWNLOAD_SECONDS} s")
    if done.status:
        lines = (done.output + done.errors).strip().splitlines() or ["no output"]
        raise DataError(f"`{command[0]}` ended with status {done.status}: {lines[-1]}")
    return done.output
