"""Checkpoints: a killed run resumes bit for bit. `checkpoint.Checkpoint` is the callback."""
