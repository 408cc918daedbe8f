"""Carry a plan out: the exchange of a step, and the state of each rank between steps.

executor        gradients in, exchanged gradients out; one runner per bucket
bucket_runner   one bucket's step: flatten, route, momentum, residual, average, unflatten
selector        which entries of a bucket travel on a sparse route
residuals       what a rank keeps of a plan's buckets, how it is saved and redistributed
rates           residuals shrink while the learning rate rises
flat            gradients to flat vectors and back
clipping        the joint norm of a rank's gradients
agreement       all ranks carry out the same plan
replica_guard   weights, learning rate and step count are equal on all ranks
balance         work dealt out evenly
trial           several plans take turns, step by step, and the fastest stays
trial_rounds    the order of their turns, and which plan the times choose
"""
