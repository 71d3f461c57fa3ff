"""The step of the whole run, where Keras counts each epoch from batch 0."""

import threading

SECONDS = 30  # callbacks in other threads get so long to finish a batch that the device has done


class StepCounter:
    """Counts the batches of a whole run, over its epochs, restarts and calls of `fit`.

    Attributes:
        step: Batches that have begun.
        epoch: The current epoch.
        skipped: Batches of that epoch that were done before a restart; Keras does not count them.
    """

    def __init__(self):
        self.step = 0
        self.epoch = 0
        self.skipped = 0
        self._first = 0  # the step of Keras' batch 0
        self._begun = self._ended = self._reached = 0
        self._ends = threading.Condition()

    def open_epoch(self, epoch: int, skipped: int) -> None:
        """Before the first batch of an epoch."""
        self.epoch, self.skipped, self._first = epoch, skipped, self.step
        self._begun = self._ended = self._reached = 0

    def step_of(self, batch: int) -> int:
        """The step of the whole run at which a batch of Keras' count begins."""
        return self._first + batch

    def begin(self, batch: int, executed: int) -> None:
        """Counts one call of the training function, which runs `executed` batches."""
        self.step = self._first + batch + executed
        self._begun += 1

    def end(self, batch: int) -> None:
        """Notes the end of that call; `batch` is its last one. Any thread may call it, late."""
        with self._ends:
            self._ended += 1
            self._reached = max(self._reached, batch + 1)
            self._ends.notify_all()

    def wait(self) -> bool:
        """Waits until all calls have ended. Returns False if one of them does not."""
        with self._ends:
            return self._ends.wait_for(lambda: self._ended >= self._begun, SECONDS)

    def close_epoch(self) -> None:
        """After the last batch. TensorFlow begins one more to see that there is none."""
        self.step, self._begun = self._first + self._reached, self._ended
