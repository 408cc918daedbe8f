"""`tfcommx --version`: versions from package metadata; nothing is imported."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Annotated

import typer

# Name -> packages that may hold it; the first installed one counts
PACKAGES = {
    "tfcommx": ("tfcommx",),
    "TensorFlow": ("tensorflow", "tensorflow-cpu"),
    "Keras": ("keras",),
    "Horovod": ("horovod",),
}


def versions() -> dict[str, str]:
    """Return the version of each package, or "not installed", and Python's."""
    found = {name: _version(packages) for name, packages in PACKAGES.items()}
    return {**found, "Python": platform.python_version()}


def _version(packages: tuple[str, ...]) -> str:
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _show(asked: bool) -> None:
    if asked:
        print("\n".join(f"{name} {version}" for name, version in versions().items()))
        raise typer.Exit


def version(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show, is_eager=True, help="Show versions, and exit."),
    ] = False,
) -> None:
    """Take options that come before a command."""
