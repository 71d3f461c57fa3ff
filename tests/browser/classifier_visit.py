"""A visitor's actions on the page of docs/browser, and what the page shows."""

import json
import time
from pathlib import Path

import chromium_pipe


class Visit(chromium_pipe.Page):
    """The open page, and a visitor's actions."""

    def __init__(self, chromium, url, scheme="light"):
        super().__init__(chromium, url, 900, 900, scheme, "#status")
        self.wait("!/^Not started|[.]{3}$/.test(document.querySelector('#status').textContent)")

    def wait(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not self.value(condition):
            if time.monotonic() > end:
                raise TimeoutError(f"{condition}: {self.said} {self.problem} {self.problems}")
            time.sleep(0.02)

    @property
    def said(self):
        return self.text("#status")

    @property
    def problem(self):
        """The error that the page shows, or nothing."""
        return self.text("#problem")

    def forget(self):
        """Clears the messages of the page, so that the next one is new."""
        for place in ("status", "problem"):
            self.value(f"document.querySelector('#{place}').textContent = ''")

    def done(self, name):
        """Waits until the page has handled a file."""
        start = json.dumps(f"{name}: ")
        said = "document.querySelector('#status').textContent"
        problem = "document.querySelector('#problem').textContent"
        self.wait(f"{problem} || {said} === 'Ready.' || {said}.startsWith({start})")

    def choose(self, field, file):
        self.forget()
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=f"#{field}")["nodeId"]
        self.send("DOM.setFileInputFiles", files=[str(file)], nodeId=node)
        self.done(Path(file).name)

    def drop(self, file):
        self.forget()
        data = {"items": [], "files": [str(file)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.send("Input.dispatchDragEvent", type=kind, x=450, y=700, data=data)
        self.done(Path(file).name)

    def rows(self):
        """The classes that are shown, with their unrounded probabilities."""
        assert not self.problem
        return self.value(
            "[...document.querySelectorAll('#classes li')].map(e => ["
            "e.querySelector('.name').textContent, Number(e.querySelector('data').value)])"
        )

    @property
    def outside(self):
        """Requested URLs that belong neither to this machine nor to the page itself."""
        own = ("http://127.0.0.1:", "data:", "blob:")
        return [url for url in self.requests if not url.startswith(own)]

    @property
    def errors(self):
        """The problems without LiteRT's log, which goes to the console."""
        return [p for p in self.problems if "args" not in p and not _is_warning(p)]


def _is_warning(problem):
    return problem.get("entry", {}).get("level") == "warning"
