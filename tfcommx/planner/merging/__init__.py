"""Which gradients travel together: one solver a file."""
