"""A training step as a timeline: compute, selection, messages, update; the ports of a cluster.

`models` has tables of layers of known models, so that steps can be simulated without the model,
without a cluster and without TensorFlow.
"""
