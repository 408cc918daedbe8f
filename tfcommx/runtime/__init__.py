"""Carry a plan out: the exchange of a step, and the state of each rank between steps.

executor        gradients in, exchanged gradients out; one runner per bucket
bucket_runner   one bucket's step: flatten, clip, select or compress, route, average, unflatten
gradient_state  residuals and the like by variable, as they move between plans and are saved
residuals       residuals and the like by bucket, as a plan uses them; exported and loaded
rates           residuals shrink while the learning rate rises
replica_guard   weights, learning rate and step count are equal on all ranks
trial           several plans take turns, step by step, and the fastest stays
"""
