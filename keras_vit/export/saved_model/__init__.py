"""A model as a SavedModel, for TensorFlow Serving."""
