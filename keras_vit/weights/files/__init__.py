"""Reads weight files that others wrote, safely, and writes ours."""
