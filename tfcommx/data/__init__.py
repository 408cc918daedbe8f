"""Input: DataCache, which keeps decoded samples of a node in shared memory, and its sources.

cache       DataCache: read and decode once, then feed every process of the node from memory
options     settings of storage (Options) and of batches (BatchSpec)
order       the samples of each rank in an epoch, and their order
epochs      some epochs as batches of sample numbers, and counts of the served samples
loader, batches         load a batch: missing samples are read, decoded and stored first
slab, slab_files        the memory of a node, in a file of shared memory
capacity    the memory that samples need, and the memory that is available
disk        the disk level: encoded bytes as the source returned them
reshuffle   moves samples between nodes before an epoch
sources     origins of samples: arrays, folders, TFRecord files
pipeline    prefetch depths, and Python functions that TensorFlow's threads call
"""
