"""Snapshots of a supervised run in the memory of its hosts."""
