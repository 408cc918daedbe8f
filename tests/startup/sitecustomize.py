"""Every Python process of the tests runs this first: TensorFlow is imported with less collecting.

Importing it makes 300,000 objects that all stay; by default Python looks through them dozens of
times, for a sixth of the import. The tests start some 300 processes that import TensorFlow. It
also makes each collection of a launch's graphs smaller: other ranks wait for it.
"""

import gc

gc.set_threshold(300_000, 10, 10)
