"""Loads TensorFlow without its start-up messages: scripts import this before all else."""

from tfcommx.cli.environment import load_tensorflow, quiet_tensorflow

quiet_tensorflow()
load_tensorflow()
