"""Carries a recipe out: train, timing, evaluation, history, learning rate."""
