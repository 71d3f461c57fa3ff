"""The run folder, and what a run writes into it: logs, the trained model, the report."""
