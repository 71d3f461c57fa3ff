"""`python -m keras_vit_cli`, the same as `keras-vit`."""

from keras_vit_cli.main import main

if __name__ == "__main__":
    main()
