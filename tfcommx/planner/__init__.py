"""When: from what a user asks for to what is done bucket by bucket, without TensorFlow.

check      refuses schemes that cannot be carried out
streams    which gradients may travel together; merging/ which do; prices what both cost
plan       the buckets
predict    the step that a scheme would take; choose ranks schemes by it, sensitivity says what
           would shorten it, automatic proposes plans to try for Scheme("auto")
"""
