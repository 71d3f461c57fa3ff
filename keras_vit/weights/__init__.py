"""Checkpoints of any library: fetched, recognized, read, converted, written."""
