"""Trains what a recipe describes: the loop over phases, timing, history, saving, dry runs."""
