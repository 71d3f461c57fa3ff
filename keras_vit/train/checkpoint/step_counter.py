"""Which step a run is at, counted while Keras begins each epoch at batch 0."""

import threading

SECONDS = 30  # that callbacks in other threads get to end a batch that the device has done


class Counter:
    """Counts the batches of a whole run, over its epochs, restarts and calls of `fit`.

    Attributes:
        step: Batches that are done, or begun.
        epoch: The epoch that was opened last.
        skipped: Batches of that epoch that were done before a restart, which Keras does not count.
    """

    def __init__(self):
        self.step = 0
        self.epoch = 0
        self.skipped = 0
        self._first = 0  # the step at which Keras began to count
        self._begun = self._ended = self._reached = 0
        self._ends = threading.Condition()

    def open_epoch(self, epoch: int, skipped: int) -> None:
        """Before the first batch of an epoch."""
        self.epoch, self.skipped, self._first = epoch, skipped, self.step
        self._begun = self._ended = self._reached = 0

    def step_of(self, batch: int) -> int:
        """Batches of the whole run that come before one of Keras' count."""
        return self._first + batch

    def begin(self, batch: int, executed: int) -> None:
        """One call of the training function, which does several batches or one."""
        self.step = self._first + batch + executed
        self._begun += 1

    def end(self, batch: int) -> None:
        """The same call is over; `batch` is its last one. It may come later, in any thread."""
        with self._ends:
            self._ended += 1
            self._reached = max(self._reached, batch + 1)
            self._ends.notify_all()

    def wait(self) -> bool:
        """Waits until all that was begun has ended; False, if one of them does not."""
        with self._ends:
            return self._ends.wait_for(lambda: self._ended >= self._begun, SECONDS)

    def close_epoch(self) -> None:
        """After the last batch: TensorFlow begins one more to see that there is none."""
        self.step, self._begun = self._first + self._reached, self._ended
