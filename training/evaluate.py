"""`python -m training.evaluate ...` in a checkout is `keras-vit evaluate ...`."""

import sys

from keras_vit_cli.main import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
