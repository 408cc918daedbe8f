"""Carries a plan out: one step of the exchange, and what each rank keeps between steps.

executor        gradients in, exchanged gradients out; one runner per bucket
bucket_runner   one bucket's step: flatten, route, momentum, residual, average, unflatten
selector        which entries of a bucket travel on a sparse route
residuals       what a rank keeps of a plan's buckets, how it is saved and redistributed
rates           learning rates that rise, which residuals follow
flat, clipping  gradients to flat vectors and back; the joint norm of a rank's gradients
agreement       all ranks carry out the same plan
trial           several plans take turns, step by step, and the fastest stays
trial_rounds    the order of their turns, and which plan the times choose
"""
