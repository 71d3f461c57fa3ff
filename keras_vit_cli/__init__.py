"""The `keras-vit` command: one module a command, `main` to run them, `output` to print.

The package stands beside `keras_vit` because importing anything inside `keras_vit` imports Keras
and its backend, which takes seconds. No module here imports `keras_vit` at its top: a command calls
`backend.load_library` when it needs it, so `--help` and usage errors answer at once.
"""
