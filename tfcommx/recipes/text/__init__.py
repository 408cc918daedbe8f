"""What translation needs: vocabulary, batches, layers, loss, decoding.

Batches and vocabulary load no TensorFlow.
"""
