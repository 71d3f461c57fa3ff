"""A model as a TFLite file, for phones and browsers."""
