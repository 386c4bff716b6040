"""Write the pictures of the report page in docs/, from a page that `tvmconv report` wrote.

    python docs/page_pictures.py docs/resnet50-56x56.html docs

It needs Chromium and its driver, and the package selenium (extra `dev`). The page has to be about `vthread` and
`conflict_free`.
"""

from __future__ import annotations

import argparse
import base64
import io
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image

WIDTH, HEIGHT = 1280, 2000  # px, of the window
MARGIN = 8  # px, around a picture
NUM_COLORS = 64  # of a picture, which takes a third of the bytes
CODE_LINES = 15  # in the picture of code
ACCESS = ".request[aria-label^='load of padded_shared, shared memory']"  # of vthread, which has bank conflicts
# Choose the access, and return the box of the first lines of all columns.
FIND_CODE = f"""
    document.querySelector("nav").remove();
    document.querySelector("{ACCESS}").dispatchEvent(new MouseEvent("click", {{bubbles: true}}));
    document.querySelector(".status").remove();
    const columns = document.querySelector(".kernel .columns.code");
    columns.scrollIntoView({{behavior: "instant"}});
    const line = columns.querySelector("[data-groups]").getBoundingClientRect();
    for (const box of columns.querySelectorAll(".lines")) {{
      const lit = box.querySelector(".lit");
      if (lit) box.scrollTop = lit.offsetTop - arguments[0] / 3 * line.height;
    }}
    const box = columns.getBoundingClientRect();
    const top = columns.querySelector(".lines").getBoundingClientRect().top;
    return [box.x + scrollX, box.y + scrollY, box.width, top - box.y + arguments[0] * line.height];
"""
# Return the box of the chosen access of the first kernel, and the accesses of the second kernel beside it.
FIND_BANKS = f"""
    const access = document.querySelector("{ACCESS}");
    const pictures = document.querySelector(".columns.pictures");
    const inOther = [...pictures.children[1].querySelectorAll(".request")].find(
      (each) => each.getAttribute("aria-label").startsWith("load of padded"));
    const shift = access.getBoundingClientRect().top - inOther.getBoundingClientRect().top;
    pictures.children[shift > 0 ? 1 : 0].style.marginTop = `${{Math.abs(shift)}}px`;
    access.scrollIntoView({{behavior: "instant"}});
    const box = pictures.getBoundingClientRect();
    const boxes = [access, inOther].map((each) => each.getBoundingClientRect());
    const top = Math.min(...boxes.map((each) => each.top)) - 4;
    const bottom = Math.max(...boxes.map((each) => each.bottom)) + 4;
    return [box.x + scrollX, top + scrollY, box.width, bottom - top];
"""


def open_browser() -> Any:
    """Start Chromium without a window."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={WIDTH},{HEIGHT}"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def capture(driver: Any, file: Path, box: list[float]) -> None:
    """Write the part of the page in a box (x, y, width, height in px) as a PNG."""
    x, y, width, height = box
    clip = {"x": x - MARGIN, "y": y - MARGIN, "width": width + 2 * MARGIN, "height": height + 2 * MARGIN, "scale": 1}
    arguments = {"format": "png", "clip": clip, "captureBeyondViewport": True}
    data = base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", arguments)["data"])
    Image.open(io.BytesIO(data)).convert("RGB").quantize(NUM_COLORS).save(file, optimize=True)


def main() -> int:
    """Parse the command line and write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="Page of `tvmconv report`.")
    parser.add_argument("folder", type=Path, help="Folder to write page-code.png and page-banks.png to.")
    args = parser.parse_args()
    driver = open_browser()
    try:
        driver.get(args.page.resolve().as_uri())
        capture(driver, args.folder / "page-code.png", driver.execute_script(FIND_CODE, CODE_LINES))
        capture(driver, args.folder / "page-banks.png", driver.execute_script(FIND_BANKS))
    finally:
        driver.quit()
    return 0


if __name__ == "__main__":
    sys.exit(main())
