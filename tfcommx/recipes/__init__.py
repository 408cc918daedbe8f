"""Recipes: YAML files that say what a run trains, on what, and how.

A recipe has one member of each family: `datasets`, `models`, `tasks`, `optimizers`. `base` holds
the families' contracts; each family has a table, with how to add a member above it. Reading a
recipe loads no TensorFlow.
"""
