"""Data sets of the recipes: one a file."""
