"""Takes the pictures of these pages in a headless Chromium, from results in reports/: `make docs`.

Each is one part of a report's page, by its CSS selector, 1,100 pixels wide.
"""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path

from PIL import Image, ImageOps
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from dlprof.report import html
from dlprof.result.stored import from_json

HERE = Path(__file__).parent
RESULTS = HERE.parent / "reports" / "2-cpu-cores"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,1000")
DRAWN = "return document.documentElement.dataset.drawn"
MARGIN = 20  # pixels
# Picture: the report that it is of, and the part of the page.
PICTURES = {
    "verdict": ("ddp_resnet-slow_loader_one_rank", "header.verdict"),
    "where": ("ddp_resnet-slow_loader_one_rank", "#where"),
    "finding": ("ddp_resnet-slow_loader_one_rank", "#finding-1"),
    "pipeline": ("pipeline_transformer-uneven_split", "#finding-1"),
}


def main() -> None:
    """Take all pictures anew."""
    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    with tempfile.TemporaryDirectory() as folder, webdriver.Chrome(options) as browser:
        for name, (report, part) in PICTURES.items():
            page = Path(folder) / "report.html"
            page.write_text(html.render(from_json(json.loads((RESULTS / report / "result.json").read_bytes()))))
            browser.get(page.as_uri())
            WebDriverWait(browser, 60).until(lambda b: b.execute_script(DRAWN))
            browser.set_window_size(1100, browser.execute_script("return document.documentElement.scrollHeight") + 200)
            taken = Image.open(io.BytesIO(browser.find_element(By.CSS_SELECTOR, part).screenshot_as_png)).convert("RGB")
            picture = ImageOps.expand(taken, MARGIN, taken.getpixel((0, 0)))
            # 64 colours are enough for flat areas and text, and a fourth of the bytes.
            picture.quantize(64).save(HERE / "pictures" / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
