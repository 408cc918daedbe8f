"""Execute a plan: the exchange of a step, and the state of each rank between steps.

executor        gradients in, exchanged gradients out; one runner per bucket
bucket_runner   one bucket's step: flatten, clip, select or compress, route, average, unflatten
gradient_state  residuals, velocities and other state by variable, for other plans and files
residuals       the same state by bucket, for a plan; exports and loads it by variable
rates           shrinks residuals while the learning rate rises
replica_guard   checks that weights, learning rate and step count are equal on all ranks
trial           lets several plans take turns, step by step, and keeps the fastest
"""
