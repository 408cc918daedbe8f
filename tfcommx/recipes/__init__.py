"""Recipes: YAML files that describe a run: data, model, task, optimizer and schedule.

A recipe has one member of each family: `datasets`, `models`, `tasks`, `optimizers`. `families`
holds the contracts. Each family has a table of its members; the text above the table says how to
add one. Reading a recipe loads no TensorFlow.
"""
