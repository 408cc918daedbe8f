"""What carries a plan out."""
