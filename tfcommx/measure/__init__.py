"""Measure the inputs of plans and simulations: links, engine, a model's layers, its exchange."""
