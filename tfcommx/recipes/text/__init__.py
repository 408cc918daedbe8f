"""Building blocks of translation: vocabulary, batches, layers, loss, decoding.

Batches and vocabulary load no TensorFlow.
"""
