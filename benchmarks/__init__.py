"""The speed of keras_vit compared with other libraries in one run. Not part of the tests."""
