"""PyTorch in an environment without TensorFlow, for measurements beside tfcommx."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.records import ROOT

FOLDER = ROOT / "build" / "frameworks" / "torch"
PACKAGES = ("torch", "numpy")


def python() -> Path:
    """Return the environment's Python; the first call installs PyTorch."""
    python = FOLDER / "bin" / "python"
    if not python.exists():
        print(f"PyTorch is installed into {FOLDER.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


def use() -> None:
    """Let this process, which may have imported TensorFlow, import the environment's PyTorch."""
    (packages,) = FOLDER.glob("lib/python*/site-packages")
    # Last, because both environments have NumPy
    sys.path.append(str(packages))
    # Triton's LLVM and TensorFlow's in one process end it with a segmentation fault
    sys.modules["triton"] = None  # type: ignore[assignment]
