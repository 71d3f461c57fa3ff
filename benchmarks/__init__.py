"""Speed of keras_vit beside other libraries, measured in one run. Never run by the tests."""
