"""DataCache: decoded samples of a node in shared memory."""
