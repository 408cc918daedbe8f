"""The Keras surface: the wrapped optimizer, callbacks, checkpoints."""
