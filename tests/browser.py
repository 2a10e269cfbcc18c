"""A real browser on a built site: what it reports, and what a reader would find wrong on a page."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

_QUIET = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking".split()
_QUIET += ["--disable-component-update", "--disable-sync", "--disable-extensions", "--no-default-browser-check"]

# Ratio of every visible text to what lies behind it, for texts below the limit of WCAG 2.2 AA.
_LOW_CONTRAST = """() => {
  const context = Object.assign(document.createElement("canvas"), {width: 1, height: 1})
    .getContext("2d", {willReadFrequently: true})
  const known = new Map()
  const parse = (color) => {
    if (!known.has(color)) {
      context.clearRect(0, 0, 1, 1)
      context.fillStyle = color
      context.fillRect(0, 0, 1, 1)
      const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data
      known.set(color, [r, g, b, a / 255])
    }
    return known.get(color)
  }
  const over = (top, bottom) => [0, 1, 2].map((i) => top[i] * top[3] + bottom[i] * (1 - top[3])).concat(1)
  const luminance = (color) => {
    const [r, g, b] = color.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
  }
  const behind = (element) => {
    const layers = []
    for (let e = element; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor))
    return layers.reverse().reduce((bottom, layer) => over(layer, bottom), [255, 255, 255, 1])
  }
  const found = []
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement
    if (!node.data.trim() || element.closest("script, style, noscript, template, mjx-container, .headerlink")) continue
    if (!element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue
    const range = document.createRange()
    range.selectNodeContents(node)
    const area = range.getBoundingClientRect()
    if (area.width < 2 || area.height < 2 || area.right < 0 || area.bottom + scrollY < 0) continue
    const style = getComputedStyle(element)
    let alpha = 1
    for (let e = element; e; e = e.parentElement) alpha *= parseFloat(getComputedStyle(e).opacity)
    if (alpha < 0.1) continue // fading in or out
    const background = behind(element)
    const [r, g, b, a] = parse(style.color)
    const ink = over([r, g, b, a * alpha], background)
    const [light, dark] = [luminance(ink), luminance(background)].sort((x, y) => y - x)
    const size = parseFloat(style.fontSize), bold = parseInt(style.fontWeight) >= 700
    const limit = size >= 24 || (bold && size >= 18.66) ? 3 : 4.5
    const ratio = (light + 0.05) / (dark + 0.05)
    const tag = `<${element.tagName.toLowerCase()} class="${element.className}">`
    if (ratio < limit) found.push(`${ratio.toFixed(2)}:1 ${tag} ${node.data.trim().slice(0, 40)}`)
  }
  return [...new Set(found)]
}"""

_CALM = """() => Promise.all(document.getAnimations()
  .filter((animation) => Number.isFinite(animation.effect.getComputedTiming().endTime))
  .map((animation) => animation.finished.catch(() => {})))"""

_RAW_LATEX = r"""() => {
  const pattern = /\$[^$\n]+\$|\\[(\[]|\\(sum|frac|mathrm|text|cdot|in|begin|left|operatorname)\b/
  const found = []
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  while (walker.nextNode()) {
    const node = walker.currentNode
    if (node.parentElement.closest("script, style, noscript, template, code, pre, mjx-container")) continue
    if (pattern.test(node.data)) found.push(node.data.trim().slice(0, 80))
  }
  return found
}"""

_BAD_IMAGES = """async () => {
  const bad = []
  for (const image of document.images) {
    if (!image.alt.trim()) bad.push(`no alternative text: ${image.src}`)
    if (!image.checkVisibility()) continue
    image.scrollIntoView()
    await Promise.race([image.decode().catch(() => {}), new Promise((done) => setTimeout(done, 5000))])
    if (!image.naturalWidth) bad.push(`nothing to see: ${image.src}`)
    if (!image.getAttribute("width") || !image.getAttribute("height")) bad.push(`no size: ${image.src}`)
  }
  scrollTo(0, 0)
  return bad
}"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves a folder on loopback; gives its address, ending in a slash."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def chromium() -> Iterator:
    """A headless Chromium; skips the test where there is none, fails it where GUIDE_REQUIRE_BROWSER is 1."""
    program = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    if program is None:
        message = "no Chromium found. Debian: apt-get install chromium; elsewhere put `chromium` on the PATH"
        if os.environ.get("GUIDE_REQUIRE_BROWSER") == "1":
            pytest.fail(message)
        pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=_QUIET)
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """One browser tab in one palette, which remembers everything that went wrong."""

    def __init__(self, browser, address: str, palette: str, width: int = 1280):
        self.address, self.errors = address, []
        self.size = {"width": width, "height": 900}
        self.context = browser.new_context(color_scheme=palette, viewport=self.size)
        self.page = self.context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.errors.append(f"script error: {error}"))
        self.page.on("requestfailed", self._failed)
        self.page.on("request", self._request)
        self.page.on("response", self._response)

    def open(self, path: str) -> "Visit":
        """Opens a page of the site and waits until its mathematics is set."""
        self.page.goto(self.address + path, wait_until="load")
        return self.settle()

    def switch(self, palette: str) -> "Visit":
        """Changes the system's palette, which an open page follows."""
        self.page.emulate_media(color_scheme=palette)
        scheme = {"light": "default", "dark": "slate"}[palette]
        if self.page.url != "about:blank":
            self.page.wait_for_selector(f"body[data-md-color-scheme={scheme}]")
        return self

    def settle(self) -> "Visit":
        """Waits for mathematics after a load, a click or a change of palette."""
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('.arithmatex, .nb-math')]"
            ".every((e) => e.querySelector('mjx-container') || !/\\\\\\(|\\\\\\[|\\$/.test(e.textContent))",
            timeout=10_000,
        )
        return self

    def problems(self, *, phone: bool = True) -> list[str]:
        """What is wrong with the open page, for a reader at a desk and, if wanted, with a phone."""
        page = self.page
        page.evaluate(_CALM)
        found = [f"low contrast: {text}" for text in page.evaluate(_LOW_CONTRAST)]
        found += [f"raw LaTeX: {text}" for text in page.evaluate(_RAW_LATEX)]
        found += page.evaluate(_BAD_IMAGES)
        if phone:
            page.set_viewport_size({"width": 360, "height": 740})
            wide = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
            if wide > 0:
                found.append(f"{wide} pixels too wide for a phone")
            found += [f"on a phone, {text}" for text in page.evaluate(_BAD_IMAGES)]
            page.set_viewport_size(self.size)
        found += self.errors
        self.errors = []
        return found

    def close(self) -> None:
        self.context.close()

    def _console(self, message) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"console {message.type}: {message.text}")

    def _failed(self, request) -> None:
        if request.failure != "net::ERR_ABORTED":  # the tab went elsewhere before a prefetch ended
            self.errors.append(f"request failed: {request.url} {request.failure}")

    def _request(self, request) -> None:
        host = urlsplit(request.url).netloc
        if host and host != urlsplit(self.address).netloc:
            self.errors.append(f"request to another host: {request.url}")

    def _response(self, response) -> None:
        if response.status >= 400:
            self.errors.append(f"HTTP {response.status}: {response.url}")
