"""Keras layers that compute over all ranks.

sync_batch_normalization   batch normalization by the joint batch of all ranks
"""

from tfcommx.optim.sync_batch_normalization import SyncBatchNormalization

__all__ = ["SyncBatchNormalization"]
