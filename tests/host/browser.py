"""The host's own front end in Chromium, driven by playwright: what a person in a browser has before them."""

import contextlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tests.host.client import HostClient

# playwright's own download of a browser is not needed: Debian's and Ubuntu's package does.
HOW_TO_INSTALL = "There is no Chromium to test the front end with: `apt-get install chromium` (as root) brings it."

# No sandbox: CI runs as root. The others keep Chromium from calling its maker while it starts.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]

# The newest front end that the pack was tried with; the host brings an older one of its own.
NEWEST_FRONT_END = "comfyui-frontend-package==1.58.1"

READY = "() => Boolean(window.app?.graph && window.LiteGraph?.registered_node_types.Ref2VLoadRefiner)"


TEMPLATES_OPEN = "() => Boolean(document.querySelector('[data-testid^=template-workflow]'))"


def find_chromium() -> str | None:
    """The path of a Chromium or Chrome on this machine."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


def newest_front_end(folder: Path) -> Path:
    """The folder of files of NEWEST_FRONT_END, for the host's --front-end-root; fetched into `folder` if need be."""
    ready = folder / NEWEST_FRONT_END.replace("==", "-")
    if not ready.is_dir():
        partial = folder / f"{ready.name}.{os.getpid()}.partial"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", partial, NEWEST_FRONT_END]
        subprocess.run(command, check=True, timeout=300)
        (wheel,) = partial.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
        wheel.unlink()
        with contextlib.suppress(OSError):  # another run of the tests has been faster
            partial.rename(ready)
        shutil.rmtree(partial, ignore_errors=True)
    return ready / "comfyui_frontend_package" / "static"


@contextlib.contextmanager
def front_end(
    host: HostClient, *, locale: str = "en-US", first_visit: bool = False, nodes_2: bool = False
) -> Iterator:
    """A playwright page of the host's front end with all nodes registered, in a browser of its own.

    nodes_2: with "Nodes 2.0", which draws nodes as elements of the page. On a first visit the template browser lies
    open over an empty graph; later ones start with the host's own workflow.
    """
    from playwright.sync_api import sync_playwright

    settings = {"Comfy.TutorialCompleted": not first_visit, "Comfy.InstalledVersion": ""}
    host.post("/settings", {**settings, "Comfy.VueNodes.Enabled": nodes_2})
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
