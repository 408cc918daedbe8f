"""Imported before all else, by benchmarks: TensorFlow is loaded, and prints nothing of its own."""

from tfcommx.cli.environment import load_tensorflow, quiet_tensorflow

quiet_tensorflow()
load_tensorflow()
