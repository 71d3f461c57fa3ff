"""What an operator of TensorFlow Serving needs: its config files, and a client to try it."""
