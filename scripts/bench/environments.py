"""Environments of other frameworks, for measurements beside tfcommx."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.records import ROOT

TORCH = ROOT / "build" / "frameworks" / "torch"


def python_with(folder: Path, packages: Sequence[str]) -> Path:
    """Return the Python of an environment; the first call installs the packages.

    An environment of another Python version is made anew, because its modules would not load.

    Args:
        folder: of the environment, which may have other packages besides.
        packages: as pip takes them.
    """
    python, made_by = folder / "bin" / "python", folder / "made-by"
    # Both files are written last: a call that was interrupted is repeated
    if not made_by.exists() or made_by.read_text() != sys.version:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        made_by.write_text(sys.version)
    installed = folder / f"installed-{'-'.join(packages)}"
    if not installed.exists():
        print(f"{', '.join(packages)}: installed into {folder}", flush=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        installed.touch()
    return python


def torch_python() -> Path:
    """Return the Python of an environment with PyTorch and without TensorFlow."""
    return python_with(TORCH, ("torch", "numpy"))


def use_torch() -> None:
    """Let this process, which may have imported TensorFlow, import the environment's PyTorch."""
    (packages,) = TORCH.glob("lib/python*/site-packages")
    # Last, because both environments have NumPy
    sys.path.append(str(packages))
    # Triton's LLVM and TensorFlow's in one process end it with a segmentation fault
    sys.modules["triton"] = None  # type: ignore[assignment]
