"""What a ViT can be trained for besides labels: each a `keras.Model` around a `ViT`."""
