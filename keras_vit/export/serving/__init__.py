"""What an operator of TensorFlow Serving needs: its config files and their README."""
