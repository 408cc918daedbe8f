"""A training step as a timeline: compute, selection, messages, update; the ports of a cluster.

assumptions    what is assumed besides plan, profile and links; selection_time is part of it
disturbances   the slowest of ports whose rates vary
backward_pass  when the gradients of a bucket are ready
stages         what a bucket does then, and for how long
step           who waits for whom: the timeline
models/        tables of layers of known models: steps without the model, a cluster or TensorFlow
"""
