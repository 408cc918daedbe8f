"""A training step as a timeline: compute, selection, messages, update; the ports of a cluster.

assumptions  assumptions besides plan, profile and links: selection times, slow nodes, varying ports
step         when the gradients of a bucket are ready, its stages after that, and the timeline
models/      layer tables of known models: profiles without the model, a cluster or TensorFlow
"""
