"""What is done to training images: one at a time (`image`), then by the batch (`mixing`)."""
