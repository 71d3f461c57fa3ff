"""Optimizers, schedules and layer-wise learning-rate decay, on Keras' own."""
