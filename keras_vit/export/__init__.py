"""Models on their way to where they serve: folded, compiled for a runtime, verified."""
