"""The host's own front end in Chromium, driven by playwright: what a person in a browser has before them."""

import contextlib
import shutil
from collections.abc import Iterator

from tests.host.client import HostClient

# playwright's own download of a browser is not needed: Debian's and Ubuntu's package does.
HOW_TO_INSTALL = "There is no Chromium to test the front end with: `apt-get install chromium` (as root) brings it."

# No sandbox: CI runs as root. The others keep Chromium from calling its maker while it starts.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]

READY = "() => Boolean(window.app?.graph && window.LiteGraph?.registered_node_types.Ref2VLoadRefiner)"


TEMPLATES_OPEN = "() => Boolean(document.querySelector('[data-testid^=template-workflow]'))"


def find_chromium() -> str | None:
    """The path of a Chromium or Chrome on this machine."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


@contextlib.contextmanager
def front_end(host: HostClient, *, locale: str = "en-US", first_visit: bool = False) -> Iterator:
    """A playwright page of the host's front end with all nodes registered, in a browser of its own.

    On a first visit the template browser lies open over an empty graph; later ones start with the host's own workflow.
    """
    from playwright.sync_api import sync_playwright

    host.post("/settings", {"Comfy.TutorialCompleted": not first_visit, "Comfy.InstalledVersion": ""})
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        try:
            page = browser.new_page(locale=locale, viewport={"width": 1600, "height": 1000})
            page.set_default_timeout(120_000)  # without a GPU and on a busy machine a frame can take seconds
            page.goto(host.url)
            page.wait_for_function(READY)
            # It is opened after the nodes are registered, and would replace what a test has loaded before.
            page.wait_for_function(TEMPLATES_OPEN if first_visit else "() => app.graph.nodes.length > 0")
            yield page
        finally:
            browser.close()
