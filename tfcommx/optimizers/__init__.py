"""Complete Keras optimizers, plain or wrapped.

lars           for large batches of convolutional networks
lamb           for large batches of Transformers
low_bit_sgd    SGD with momentum for slow networks
low_bit_lars   LARS for slow networks
one_bit_adam   Adam for slow networks
one_bit_lamb   LAMB for slow networks
"""

from tfcommx.optimizers.lamb import LAMB
from tfcommx.optimizers.lars import LARS
from tfcommx.optimizers.low_bit_lars import LowBitLARS
from tfcommx.optimizers.low_bit_sgd import LowBitSGD
from tfcommx.optimizers.one_bit_adam import OneBitAdam
from tfcommx.optimizers.one_bit_lamb import OneBitLAMB

__all__ = ["LAMB", "LARS", "LowBitLARS", "LowBitSGD", "OneBitAdam", "OneBitLAMB"]
