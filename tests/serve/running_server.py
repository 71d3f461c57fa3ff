"""`keras-vit serve` in this process, on a thread of its own and a free port."""

import contextlib
import sys
import threading
import traceback

from keras_vit.serve import Server, Settings


@contextlib.contextmanager
def running(models, **settings):
    """A server that listens, and is stopped at the end."""
    listening = threading.Event()
    server = Server(models, Settings(port=0, **settings), lambda _: listening.set())
    errors = []

    def run():
        try:
            server.run()
        except BaseException as error:  # shown by the thread that waits
            errors.append(error)
            listening.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert listening.wait(120), "the server does not listen"
        if errors:
            raise errors[0]
        yield server
    finally:
        server.stop()
        thread.join(60)
    if thread.is_alive():
        frame = sys._current_frames()[thread.ident]
        raise AssertionError("the server does not end:\n" + "".join(traceback.format_stack(frame)))
    if errors:
        raise errors[0]
