"""Complete Keras optimizers, plain or wrapped.

lars           for large batches of convolutional networks
lamb           for large batches of Transformers
one_bit_adam   Adam for slow networks
"""

from tfcommx.optimizers.lamb import LAMB
from tfcommx.optimizers.lars import LARS
from tfcommx.optimizers.one_bit_adam import OneBitAdam

__all__ = ["LAMB", "LARS", "OneBitAdam"]
