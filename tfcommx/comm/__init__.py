"""Collectives and messages between ranks, and how a process finds its place among them."""
