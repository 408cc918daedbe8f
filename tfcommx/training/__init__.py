"""What carries a recipe out."""
