"""When: from a user's request to the work of each bucket, without TensorFlow.

check      refuses schemes that cannot be carried out
plan       the buckets: which gradients may travel together; merging/ which do; prices their cost
predict    the step that a scheme would take, and changes that shorten it; choose ranks schemes by
           it, automatic proposes plans to try for Scheme("auto"), budget those within a budget
"""
