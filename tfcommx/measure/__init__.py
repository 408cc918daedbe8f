"""Measures what plans and simulations need: links, the engine, a model's layers, its exchange."""
