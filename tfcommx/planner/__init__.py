"""When: from a user's request to the work of each bucket, without TensorFlow.

check      refuses schemes that cannot be carried out
streams    which gradients may travel together; merging/ which do; prices their cost
plan       the buckets
predict    the step that a scheme would take; choose ranks schemes by it, sensitivity finds
           changes that shorten it, automatic proposes plans to try for Scheme("auto")
"""
