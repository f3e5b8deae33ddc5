"""Propose which leaf of one tree is which of another, and how its axes move."""
