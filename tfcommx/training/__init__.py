"""Train a recipe: the loop over phases, timing, history, saving, dry runs."""
