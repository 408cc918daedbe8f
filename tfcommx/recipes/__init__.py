"""What a run is made of: a recipe, read from YAML, with one member of each family.

`datasets`, `models`, `tasks` and `optimizers` are the families; `base` holds their contracts, and
each family's `__init__` its table and how to add a member. Reading a recipe loads no TensorFlow.
"""
