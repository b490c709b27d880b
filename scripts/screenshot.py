"""The part of a report's page that the README shows: the network, a node's values, the table of nodes.

    python scripts/screenshot.py PAGE PICTURE

Needs playwright and Chromium (BROWSER, else `chromium` on the path). Ends with 1 if the page writes anything to the
console, or requests anything but itself.
"""

import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

NODE = "layers.0.blocks.1.mlp.fc2._input_quantizer"


def main(page: str, picture: str) -> None:
    browser = os.environ.get("BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
    said: list[str] = []
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        tab = opened.new_page(viewport={"width": 1180, "height": 1060})
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: None if request.url.startswith("file:") else said.append(request.url))
        tab.goto(Path(page).resolve().as_uri())
        tab.wait_for_selector("#network-chart svg")
        tab.locator("#nodes button.name", has_text=NODE).click()
        tab.wait_for_selector("#values svg")
        tab.evaluate("document.activeElement.blur(); document.getElementById('nodes-of').scrollIntoView()")
        tab.screenshot(path=picture)
        opened.close()
    sys.exit(f"{page}: {said[0]}" if said else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
