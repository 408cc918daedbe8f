"""When: from what a user asks for to what is done bucket by bucket, without TensorFlow.

`check` refuses schemes that cannot be carried out, `plan` makes the plan, `merging` decides which
gradients travel together.
"""
