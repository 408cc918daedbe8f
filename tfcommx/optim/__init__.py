"""The Keras surface: the wrapped optimizer, callbacks, checkpoints.

distributed_optimizer   wraps an optimizer
from_horovod            what Horovod's arguments of DistributedOptimizer are here
exchanger               what a wrapped optimizer knows of the other ranks
keras_internals         the only room that touches private members of Keras
wrapped                 finds the wrapped optimizers of a model
optimizers              LARS (lars) and LAMB (lamb); layerwise has what they share
layers                  SyncBatchNormalization (sync_batch_normalization)
parallel_operator       computes on shares what every rank would; result_bytes carries it
broadcast               one rank's variables on every rank
callbacks, checkpoint   for `fit`
"""
