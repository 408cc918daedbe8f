"""Carry a plan out: the exchange of a step, and the state of each rank between steps.

executor        gradients in, exchanged gradients out; one runner per bucket
bucket_runner   one bucket's step: flatten, clip, select or compress, route, average, unflatten
gradient_state  what a rank keeps between steps, by variable: the form that moves and is saved
residuals       the same of a plan's buckets, at work: exported, loaded, redistributed
rates           residuals shrink while the learning rate rises
replica_guard   weights, learning rate and step count are equal on all ranks
trial           several plans take turns, step by step, and the fastest stays
"""
