"""Looks at the built site as people do, in Chromium: `make docs-browse`.

Serves `site/`, opens every page that links lead to, at the widths of a phone and of a desktop, light and dark. It takes
screenshots into `site-screenshots/`. It fails on errors in the console, on requests to other servers, on links and
anchors that lead nowhere, on pictures that do not load or have no alt text, and on pages that scroll sideways.
"""

from __future__ import annotations

import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urldefrag

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[2]
SITE, SHOTS = ROOT / "site", ROOT / "site-screenshots"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


class View(NamedTuple):
    name: str
    width: int
    height: int
    scheme: str


VIEWS = View("phone", 390, 844, "light"), View("desktop", 1440, 900, "dark"), View("desktop-light", 1440, 900, "light")

FACTS = """() => ({
  width: document.documentElement.scrollWidth,
  ids: [...document.querySelectorAll('[id]')].map(x => x.id),
  links: [...document.querySelectorAll('a[href]')].map(x => x.href),
  pictures: [...document.querySelectorAll('article img')].filter(x => getComputedStyle(x).display != 'none')
    .map(x => [x.src, x.alt, x.complete && x.naturalWidth > 0]),
})"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def served() -> str:
    handler = functools.partial(Quiet, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/"


def faults(browser: Browser, home: str, view: View) -> Iterator[str]:
    """Of every page, in one view."""
    context = browser.new_context(
        viewport={"width": view.width, "height": view.height}, color_scheme="dark" if view.scheme == "dark" else "light"
    )
    page = context.new_page()
    heard: list[str] = []
    page.on("console", lambda message: heard.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda request: heard.append(f"asks {request.url}") if not _own(request.url, home) else None)
    page.on(
        "response",
        lambda response: heard.append(f"{response.status} {response.url}") if response.status >= 400 else None,
    )
    waiting, seen, anchors, ids = [home], {home}, set[tuple[str, str, str]](), dict[str, set[str]]()
    while waiting:
        url = waiting.pop(0)
        heard.clear()
        page.goto(url, wait_until="load")
        for picture in page.locator("article img").all():  # they load lazily
            if picture.is_visible():
                picture.scroll_into_view_if_needed()
        name = url.removeprefix(home).removesuffix("/") or "index"
        found = page.evaluate(FACTS)
        ids[url] = {*found["ids"]}
        yield from (f"{name}: {text}" for text in heard)
        if found["width"] > view.width:
            yield f"{name}: scrolls sideways: {found['width']} of {view.width} pixels"
        for src, alt, loaded in found["pictures"]:
            if not loaded or not alt:
                yield f"{name}: {src.removeprefix(home)}: {'has no alt text' if loaded else 'does not load'}"
        for target, anchor in (urldefrag(link) for link in found["links"] if link.startswith(home)):
            if Path(target.removeprefix(home)).suffix:
                yield from _missing(name, target.removeprefix(home))
            else:
                anchors.add((name, target, anchor))
                waiting += {target} - seen
                seen.add(target)
        _shot(page, view, name)
    for name, target, anchor in sorted(anchors):
        if anchor and anchor not in ids[target]:
            yield f"{name}: leads to {target.removeprefix(home)}#{anchor}, which is not there"
    print(f"{view.name}: {len(seen)} pages")
    context.close()


def _missing(name: str, file: str) -> Iterator[str]:
    if not (SITE / unquote(file)).is_file():
        yield f"{name}: leads to {file}, which is not there"


def _own(url: str, home: str) -> bool:
    return url.startswith((home, "data:", "blob:"))


def _shot(page: Page, view: View, name: str) -> None:
    path = SHOTS / view.name / f"{name.replace('/', '-')}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    page.evaluate("window.scrollTo(0, 0)")
    page.screenshot(path=path, full_page=page.evaluate("document.body.scrollHeight") < 12000)


def main() -> None:
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if chromium is None:
        sys.exit("Chromium is not here: apt-get install chromium")
    if not (SITE / "index.html").is_file():
        sys.exit("site/ is not built: make docs")
    shutil.rmtree(SHOTS, ignore_errors=True)
    home, wrong = served(), 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for view in VIEWS:
            for fault in dict.fromkeys(faults(browser, home, view)):
                wrong += 1
                print(f"{view.name}: {fault}")
        browser.close()
    print(f"{wrong} faults; screenshots in {SHOTS.name}/")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
