"""The Keras surface: the wrapped optimizer, callbacks, checkpoints.

distributed_optimizer   wraps an optimizer (from_horovod: arguments of Horovod's)
exchanger               what a wrapped optimizer has to do with the other ranks; its parts:
                        exchange_settings, requested_plan (automatic, expected_run,
                        measurement_cache), carried_state, sharding, variable_names, watched_sum
keras_internals         private members of Keras
wrapped                 finds the wrapped optimizers of a model
callbacks, checkpoint   for `fit`
broadcast               one rank's variables on every rank
step_boundary, centre   between steps, in loops of one's own
optimizers              LARS (lars) and LAMB (lamb); layerwise has what they share
layers                  SyncBatchNormalization (sync_batch_normalization)
parallel_operator       shares work between ranks (parallel_shares, result_bytes)
"""
