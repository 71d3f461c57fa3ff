"""Data: where images come from (`sources`), their order (`splits`), batches (`batching`)."""
