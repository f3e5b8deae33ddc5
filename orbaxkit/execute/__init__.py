"""Executors: run plans."""
