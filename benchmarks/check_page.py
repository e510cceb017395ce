"""Open HTML files in headless Chromium and fail on any network request, console error or missing drawing.

    python -m benchmarks.check_page bubbles.html [more.html ...] [--screenshot DIR] [--dark] [--size 1280x900]

The browser is driven over its debugging pipe (file descriptors 3 and 4, messages ended by a zero byte), so that
nothing but the browser itself is needed, and only what the page does is counted: Chromium's own background
traffic is not part of it.
"""

from __future__ import annotations

import argparse
import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip

INTO_PLACE = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""What runs first in the browser's process: its two ends of the pipe go where it looks for them."""
DRAWN = "document.readyState === 'complete' && document.documentElement?.dataset.ready === 'true'"


class NoBrowser(RuntimeError):
    """None of the browsers that this script knows is on PATH."""


class PageFault(RuntimeError):
    """The page asked the network for something, complained on its console, or never finished drawing."""


def find_browser() -> str:
    """The path of the first browser of `BROWSERS` on PATH."""
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    raise NoBrowser(f"no browser found: put one of {', '.join(BROWSERS)} on PATH (Debian: apt-get install chromium)")


@dataclass(slots=True)
class Browser:
    """One headless browser, its pipe and the events it has sent so far."""

    to_browser: int
    from_browser: int
    events: list[dict[str, Any]]
    unread: bytearray
    sent: int = 0
    session: str = ""

    def call(self, method: str, timeout: float = 20.0, **parameters: Any) -> dict[str, Any]:
        """Send one command of the DevTools protocol and return its result."""
        self.sent += 1
        message: dict[str, Any] = {"id": self.sent, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while True:
            answer = self._read(deadline, method)
            if answer.get("id") == self.sent:
                if "error" in answer:
                    raise PageFault(f"{method}: {answer['error'].get('message')}")
                return dict(answer.get("result", {}))
            self.events.append(answer)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise PageFault(f"{expression}: {result['exceptionDetails'].get('text')}")
        return result["result"].get("value")

    def _read(self, deadline: float, waiting_for: str) -> dict[str, Any]:
        while (end := self.unread.find(b"\0")) < 0:
            ready, _, _ = select.select([self.from_browser], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self.from_browser, 1 << 20) if ready else b""
            if not chunk:
                raise PageFault(f"the browser gave no answer to {waiting_for}")
            self.unread += chunk
        message = json.loads(self.unread[:end])
        del self.unread[: end + 1]
        return dict(message)


@contextmanager
def browser(size: tuple[int, int] = (1280, 900), dark: bool = False) -> Iterator[Browser]:
    """Start a headless browser with one blank page whose network, console and errors are watched."""
    executable = find_browser()
    from_browser, its_output = os.pipe()
    its_input, to_browser = os.pipe()
    # High numbers, so that putting one in its place cannot overwrite the other.
    theirs = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10) for descriptor in (its_input, its_output)]
    with tempfile.TemporaryDirectory(prefix="check-page-", ignore_cleanup_errors=True) as profile:
        flags = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"]
        start = [sys.executable, "-IS", "-c", INTO_PLACE, *map(str, theirs), executable, *flags, "about:blank"]
        process = subprocess.Popen(start, pass_fds=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for descriptor in (its_input, its_output, *theirs):
            os.close(descriptor)
        try:
            session = Browser(to_browser, from_browser, [], bytearray())
            target = session.call("Target.createTarget", timeout=60.0, url="about:blank")["targetId"]
            session.session = session.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                session.call(f"{domain}.enable")
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            session.call("Emulation.setEmulatedMedia", features=[scheme])
            session.call(
                "Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False
            )
            yield session
        finally:
            process.terminate()
            process.wait(timeout=20)
            os.close(to_browser)
            os.close(from_browser)


def open_page(session: Browser, path: Path, timeout: float = 30.0) -> None:
    """Load a file and wait until the page says, by `data-ready` on its root, that it has drawn itself."""
    session.events.clear()
    session.call("Page.navigate", url=path.resolve().as_uri())
    deadline = time.monotonic() + timeout
    while session.evaluate(DRAWN) is not True:
        if faults(session, path):
            break
        if time.monotonic() > deadline:
            raise PageFault(f"{path}: not drawn after {timeout:.0f} s")
        time.sleep(0.05)


def faults(session: Browser, path: Path) -> list[str]:
    """What went wrong since `open_page`: requests beyond the file itself, console messages, exceptions."""
    found = []
    for event in session.events:
        method, body = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            url = body["request"]["url"]
            if url != path.resolve().as_uri() and not url.startswith(("data:", "blob:", "about:")):
                found.append(f"asked for {url}")
        elif method == "Runtime.exceptionThrown":
            details = body["exceptionDetails"]
            found.append(details.get("exception", {}).get("description") or details.get("text", "exception"))
        elif method == "Runtime.consoleAPICalled" and body["type"] in ("error", "warning", "assert"):
            words = [str(argument.get("value", argument.get("description"))) for argument in body["args"]]
            found.append(f"console {body['type']}: {' '.join(words)}")
        elif method == "Log.entryAdded" and body["entry"]["level"] in ("error", "warning"):
            found.append(f"log {body['entry']['level']}: {body['entry']['text']}")
    return found


def screenshot(session: Browser, path: Path) -> None:
    """Write what the page shows, in its full height, as a PNG file."""
    picture = session.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
    path.write_bytes(base64.b64decode(picture["data"]))


def check(path: Path, pictures: Path | None = None, size: tuple[int, int] = (1280, 900), dark: bool = False) -> None:
    """Open one page and raise `PageFault` with everything that went wrong."""
    with browser(size, dark) as session:
        open_page(session, path)
        session.evaluate("new Promise(done => setTimeout(done, 100))")  # late requests and errors
        if pictures is not None:
            pictures.mkdir(parents=True, exist_ok=True)
            screenshot(session, pictures / f"{path.stem}{'-dark' if dark else ''}.png")
        if found := faults(session, path):
            raise PageFault(f"{path}: " + "; ".join(found))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path, help="HTML files to open")
    parser.add_argument("--screenshot", type=Path, metavar="DIR", help="write a PNG of every page into this folder")
    parser.add_argument("--dark", action="store_true", help="ask for the dark colour scheme")
    parser.add_argument("--size", default="1280x900", help="window size, WIDTHxHEIGHT (default %(default)s)")
    options = parser.parse_args(argv)
    width, height = (int(number) for number in options.size.split("x"))
    for page in options.pages:
        try:
            check(page, options.screenshot, (width, height), options.dark)
        except (NoBrowser, PageFault) as error:
            sys.stderr.write(f"{error}\n")
            return 1
        sys.stdout.write(f"{page}: drawn, no network request, no console error\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
