"""Models of the recipes: one a file."""
