"""How the bytes of weight files are read and written."""
