#!/usr/bin/env python3
"""Make the wheels of a release, for the CPU and this Python: `make wheels`, into dist/.

    dist/tfcommx-*-py3-none-manylinux_*.whl       the package and its native ops
    dist/horovod-0.28.1-*-manylinux_*.whl         Horovod as the set-up repairs and builds it

They need no compiler where they are installed. auditwheel finds the oldest C library that they run
with; TensorFlow and Open MPI stay outside, as the wheels of the registry that they were built with.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from build_horovod import (
    OPEN_MPI,
    TENSORFLOW,
    horovod_key,
    patch_wheel,
    wheel_folder,
)
from tools import ROOT, Environment, Missing, run

# Of other wheels, which TensorFlow's and Open MPI's packages bring
OUTSIDE = ("libtensorflow*", "libmpi.so.40")
# A build number says that this is not the Horovod of the registry
BUILD_NUMBER = f"1tf{TENSORFLOW}"


def require(wheel: Path, environment: Environment, *names: str) -> Path:
    """Return a copy of a wheel that also requires these packages, with a build number."""
    folder = wheel.parent / "required"
    shutil.rmtree(folder, ignore_errors=True)
    tool = (environment.python, "-m", "wheel")
    run(*tool, "unpack", "--dest", folder, wheel)
    (unpacked,) = folder.iterdir()
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    head, separator, rest = metadata.read_text().partition("\n\n")
    lines = [head, *(f"Requires-Dist: {name}" for name in names)]
    metadata.write_text("\n".join(lines) + separator + rest)
    run(*tool, "pack", "--build-number", BUILD_NUMBER, "--dest-dir", folder, unpacked)
    return next(folder.glob("*.whl"))


def repair(wheel: Path, environment: Environment, out: Path) -> None:
    """Write a wheel, tagged with the oldest C library that it runs with; without debug symbols."""
    excluded = [word for name in OUTSIDE for word in ("--exclude", name)]
    words = ("repair", "--plat", "auto", "--strip", *excluded, "-w", out, wheel)
    path = f"{environment.folder / 'bin'}"
    run(environment.folder / "bin" / "auditwheel", *words, env={"PATH": f"{path}:/usr/bin:/bin"})


def main() -> int:
    """Make them; return the exit status."""
    environment = Environment(Path(sys.prefix))
    out = ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    built = list(wheel_folder(horovod_key(environment)).glob("horovod-*.whl"))
    if not built:
        raise Missing("Horovod must be built for the CPU first: make setup TFCOMMX_SETUP=--no-gpu")
    patched = patch_wheel(environment, built[0])
    required = (f"tensorflow-cpu=={TENSORFLOW}", OPEN_MPI)
    repair(require(patched, environment, *required), environment, out)
    fresh = environment.folder / "wheels" / "tfcommx"
    shutil.rmtree(fresh, ignore_errors=True)
    without_cuda = {**os.environ, "TFCOMMX_CUDA": "0"}
    flags = ("--no-build-isolation", "--no-deps", "-w", fresh)
    environment.pip("wheel", *flags, ".", env=without_cuda)
    repair(next(fresh.glob("tfcommx-*.whl")), environment, out)
    for path in sorted(out.iterdir()):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Missing as missing:
        print(f"[wheels] {missing}", file=sys.stderr)
        sys.exit(2)
