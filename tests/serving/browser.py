"""A real server in a thread and Chromium in front of it, for the tests of the page."""

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from steerscope.engines.api import Engine
from steerscope.serving.app import create_app
from steerscope.serving.run import Server
from steerscope.serving.settings import ServerSettings
from support.waiting import HUNG_S

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

ARTEFACTS = Path(__file__).parents[2] / "test-artefacts"


def chromium_path() -> str:
    """Where Chromium is; skips the test with the reason when there is none."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if found is None:
        pytest.skip("no Chromium on this machine: install the package chromium, or set CHROMIUM to its path")
    return found


@contextlib.contextmanager
def served(start: Callable[[], Engine], settings: ServerSettings, ready: bool = True) -> Iterator[str]:
    """The address of a server that is ready, or only listens; it ends with the block."""
    server = Server(create_app(start, settings))
    thread = threading.Thread(target=server.run, name="page-server")
    thread.start()
    try:
        came = lambda: server.started and (server.serving.ready or not ready)  # noqa: E731
        wait_for(lambda: came() or not thread.is_alive(), "the server")
        assert server.serving.failure is None, server.serving.failure
        yield server.address
    finally:
        server.should_exit = True
        thread.join()


def wait_for(done: Callable[[], object], what: str) -> None:
    end = time.monotonic() + HUNG_S
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not come")
        time.sleep(0.05)


@dataclass
class Screen:
    """The page as a person uses it. Everything it asked for, and every error it had, is kept."""

    page: "Page"
    address: str
    errors: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    sent: list[dict[str, Any]] = field(default_factory=list)  # bodies of chats

    def listen(self) -> None:
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._noted)

    def _noted(self, request: Any) -> None:
        self.asked.append(request.url)
        if request.url.endswith("/chat/completions"):
            self.sent.append(request.post_data_json)

    def open(self) -> None:
        self.page.goto(self.address)
        self.page.wait_for_selector('#status[data-state="ready"]')

    def js(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def until(self, expression: str) -> None:
        # Not page.wait_for_function: it evaluates inside the page, which its security policy forbids.
        wait_for(lambda: self.js(expression) or self.page.wait_for_timeout(40), expression)

    def say(self, text: str) -> None:
        """Type a message, send it, and wait for the whole answer."""
        turns = self.js("steerscope.state.turns.length")
        self.page.fill("#prompt", text)
        self.page.keyboard.press("Enter")
        self.until(f"steerscope.state.turns.length > {turns} && steerscope.state.running === 0")
        self.settle()

    def again(self) -> None:
        """Answer the last message once more."""
        self.page.focus("#prompt")
        self.page.keyboard.press("Control+Enter")
        self.until("steerscope.state.running === 0")
        self.settle()

    def settle(self) -> None:
        """Two frames: what was asked to be drawn is drawn."""
        self.js("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, k: int = 0) -> dict[str, Any]:
        """An answer of the last turn."""
        return self.js(f"(({{ abort, ...run }}) => run)(steerscope.state.turns.at(-1).runs[{k}])")

    def steer(self, vector: str, value: float) -> None:
        """Switch a vector on and move its slider there, as with the mouse."""
        card = self.page.locator(f'[data-vector="{vector}"]')
        card.locator(".vector-head input").set_checked(True, force=True)
        card.locator('input[type=range][aria-label="Strength"]').evaluate(
            "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', { bubbles: true })); }", value
        )

    def shot(self, name: str) -> None:
        ARTEFACTS.mkdir(exist_ok=True)
        self.page.screenshot(path=str(ARTEFACTS / f"{name}.png"))


@contextlib.contextmanager
def screen(context: "BrowserContext", address: str, **settings: object) -> Iterator[Screen]:
    """A new tab with these settings of the page."""
    if settings:
        text, key = json.dumps(json.dumps(settings)), "steerscope.settings"
        context.add_init_script(f'localStorage["{key}"] ??= {text}')
    context.set_default_timeout(HUNG_S * 1000)
    made = Screen(context.new_page(), address)
    made.listen()
    made.open()
    yield made
    made.page.close()
