"""Optimizers for large batches: complete Keras optimizers, plain or wrapped.

lars   for convolutional networks
lamb   for Transformers
"""

from tfcommx.optimizers.lamb import LAMB
from tfcommx.optimizers.lars import LARS

__all__ = ["LAMB", "LARS"]
