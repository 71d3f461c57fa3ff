"""`python -m training.train ...` in a checkout is `keras-vit train ...`."""

import sys

from keras_vit_cli.main import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
