"""Weights that others wrote: reading, recognising, converting, fetching and writing them."""
