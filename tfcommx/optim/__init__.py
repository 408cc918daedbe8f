"""The Keras surface: the wrapped optimizer, and its access to a model.

distributed_optimizer   wraps an optimizer; refuses arguments of Horovod's
exchanger               its plans by set of variables, and the state between them; its parts:
                        requested_plan (automatic), step_guard, sharding
wrapped                 finds the wrapped optimizers of a model
broadcast               one rank's variables on every rank
replica_forms, replica_outputs   compare the construction and the outputs of the ranks' models
metrics_over_ranks      metrics of all ranks' samples
step_boundary           between steps, in custom training loops
layers                  SyncBatchNormalization
"""
