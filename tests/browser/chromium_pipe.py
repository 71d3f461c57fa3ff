"""Drives a headless Chromium over its DevTools pipe: mouse, keyboard, and a page's messages.

Only the browser is needed: messages are JSON, sent through two file descriptors.
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

FLAGS = (
    "--headless",
    "--no-sandbox",  # required for root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
KEYS = {
    "Tab": 9,
    "Enter": 13,
    " ": 32,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Backspace": 8,
}


def path():
    """The browser on this machine, or None; CHROMIUM names another one."""
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


class Chromium:
    """A browser with a profile of its own, as a context manager."""

    def __init__(self, profile):
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()

        def descriptors():  # Chromium reads from 3 and writes to 4
            kept = os.dup(to_write)
            os.dup2(to_read, 3)
            os.dup2(kept, 4)
            os.set_inheritable(3, True)
            os.set_inheritable(4, True)

        command = [path(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=descriptors,
        )
        os.close(to_read)
        os.close(to_write)
        self._numbers = itertools.count(1)
        self._received = b""
        self.events = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.send("Browser.close")
        finally:
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            os.close(self._in)
            os.close(self._out)

    def send(self, method, session=None, **parameters):
        """Calls a method of the protocol and returns its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") != number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                return answer["result"]

    def _next(self, seconds=60):
        while b"\0" not in self._received:
            if not select.select([self._in], [], [], seconds)[0]:
                raise TimeoutError(f"Chromium sent nothing for {seconds} s")
            part = os.read(self._in, 1 << 20)
            if not part:
                raise EOFError("Chromium has ended")
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def page(self, file, width=1280, height=900, scheme="light", ready="html[data-ready]"):
        """Opens a file in a new tab and waits until a selector matches."""
        return Page(self, Path(file).as_uri(), width, height, scheme, ready)


class Page:
    """A tab. `problems` and `requests` have what the page reported and fetched since it opened."""

    def __init__(self, browser, url, width, height, scheme, ready):
        self._browser, self._first = browser, len(browser.events)
        self._target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.send("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.send("Emulation.setScrollbarsHidden", hidden=True)
        self.show(scheme)
        self.send("Page.navigate", url=url)
        end = time.monotonic() + 60
        while not self.value(f"document.querySelector({json.dumps(ready)}) !== null"):
            if time.monotonic() > end:
                raise TimeoutError(f"{url} is not ready: {self.problems}")
            time.sleep(0.05)

    def send(self, method, **parameters):
        return self._browser.send(method, self._session, **parameters)

    def close(self):
        self._browser.send("Target.closeTarget", targetId=self._target)

    def _events(self, *methods):
        self.value("0")  # earlier events have arrived when this is answered
        events = self._browser.events[self._first :]
        mine = [event for event in events if event.get("sessionId") == self._session]
        return [event["params"] for event in mine if event["method"] in methods]

    @property
    def problems(self):
        """Exceptions, messages to the console and dialogs."""
        return self._events(
            "Runtime.exceptionThrown",
            "Runtime.consoleAPICalled",
            "Log.entryAdded",
            "Page.javascriptDialogOpening",
        )

    @property
    def requests(self):
        return [event["request"]["url"] for event in self._events("Network.requestWillBeSent")]

    def value(self, expression):
        """The value of a JavaScript expression."""
        done = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{expression}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def text(self, selector):
        return self.value(f"document.querySelector({json.dumps(selector)}).textContent")

    def show(self, scheme):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def box(self, selector):
        """Left, top, width and height of an element in the window, after scrolling to it."""
        return self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height] })()"
        )

    def click(self, selector, across=0.5, down=0.5):
        """Clicks an element at fractions of its width and height."""
        left, top, width, height = self.box(selector)
        place = {"x": left + across * width, "y": top + down * height, "button": "left"}
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, clickCount=1, **place)

    def press(self, *keys):
        """Presses keys one after another: names as in `KEYS`, or single characters."""
        for key in keys:
            event = {"key": key, "windowsVirtualKeyCode": KEYS.get(key, ord(key[0]))}
            text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
            down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
            self.send("Input.dispatchKeyEvent", **event, **down)
            self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    def screenshot(self, file):
        """The whole page as a PNG."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        Path(file).write_bytes(base64.b64decode(shot["data"]))
        return file
