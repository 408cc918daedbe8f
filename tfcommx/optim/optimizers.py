"""Optimizers for large batches: complete Keras optimizers, plain or wrapped.

lars   for convolutional networks
lamb   for Transformers
"""

from tfcommx.optim.lamb import LAMB
from tfcommx.optim.lars import LARS

__all__ = ["LAMB", "LARS"]
