"""The page in a real browser: no error, no request, readable at 400 pixels, light and dark."""

import base64
import os
from pathlib import Path

import pytest
import sample_events as sample
from browser import browser, missing

from ringverify.reports.page import page
from ringverify.reports.results import results_of

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
NARROW, WIDE = 400, 1280
SCREENS = [(width, dark) for width in (NARROW, WIDE) for dark in (False, True)]
PAGES = {"everything": sample.everything, "crowd": sample.crowd, "one": lambda: sample.run(sample.RIGHT)}

CONTRASTS = """
function light(colour) {
  const c = colour.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2];
}
const numbers = text => text.match(/[\\d.]+/g).map(Number);
function ground(element) {
  for (; element; element = element.parentElement) {
    const c = numbers(getComputedStyle(element).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c.slice(0, 3);
  }
}
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
  const style = getComputedStyle(element);
  const colour = element.closest('svg') ? style.fill : style.color;
  const [a, b] = [light(numbers(colour).slice(0, 3)), light(ground(element))];
  found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), walker.currentNode.data.trim().slice(0, 40)]);
}
return found.sort((a, b) => a[0] - b[0]);
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """One browser for all tests."""
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages as files, in a folder with nothing else."""
    folder = tmp_path_factory.mktemp("pages")
    for name, events in PAGES.items():
        (folder / f"{name}.html").write_text(page(results_of(sample.typed(events()))), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "dark"), SCREENS)
def test_the_page_works_from_a_file(name, width, dark, chromium, pages):
    """The console is silent, nothing is asked for but the file, and nothing has to be scrolled sideways."""
    path = pages / f"{name}.html"
    chromium.open(path, width=width, dark=dark)
    assert chromium.said() == []
    assert [url for url in chromium.asked() if not url.startswith("data:,")] == [path.as_uri()]
    assert chromium.run("return [innerWidth, document.documentElement.scrollWidth]") == [width, width]
    keep(chromium, f"{name}-{width}-{'dark' if dark else 'light'}")


def keep(chromium, name):
    """A screenshot to look at, where SCREENSHOTS names a folder."""
    if folder := os.environ.get("SCREENSHOTS"):
        height = min(8000, chromium.run("return document.documentElement.scrollHeight"))
        clip = {"x": 0, "y": 0, "width": chromium.run("return innerWidth"), "height": height, "scale": 1}
        shot = {"captureBeyondViewport": True, "clip": clip}
        png = chromium.driver.execute_cdp_cmd("Page.captureScreenshot", shot)["data"]
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.png").write_bytes(base64.b64decode(png))


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_its_ground(dark, chromium, pages):
    """A contrast of 4.5 at least, which the accessibility guidelines ask of small text; and dark is dark."""
    chromium.open(pages / "everything.html", width=WIDE, dark=dark)
    chromium.run("for (const folded of document.querySelectorAll('details')) folded.open = true")
    contrasts = chromium.run(CONTRASTS)
    assert len(contrasts) > 200
    assert contrasts[0][0] >= 4.5, contrasts[:5]
    ground = chromium.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(ground) < 64) if dark else (min(ground) > 192)


def test_every_failure_is_there_and_can_be_reached(chromium, pages):
    """A link of the matrix leads to its section, which has a picture that is really drawn, and the replay line."""
    results = results_of(sample.typed(sample.everything()))
    chromium.open(pages / "everything.html", width=WIDE)
    for number, one in enumerate(results.implementations):
        for outcome in one.failures:
            anchor = f"i{number}-{outcome.id}"
            chromium.run(f"document.querySelector('td a[href=\"#{anchor}\"]').click()")
            top, said, drawn = chromium.run(
                "const found = document.getElementById(arguments[0]), map = found.querySelector('svg.map');"
                "return [found.getBoundingClientRect().top, found.innerText, map && map.getBoundingClientRect().width]",
                anchor,
            )
            assert -1 <= top < 900
            assert outcome.counterexample.replay in said
            assert (drawn is not None and drawn > 100) == (outcome.counterexample.region is not None)


def test_on_a_narrow_screen_text_is_not_cut_off(chromium, pages):
    """No element is wider than the screen, but within a part that scrolls by itself."""
    chromium.open(pages / "crowd.html", width=NARROW)
    wide = chromium.run(
        "return [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > 400.5 &&"
        " !e.closest('.scroll') && !e.closest('svg.defs')).map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []


def test_the_checks_can_fail(chromium, tmp_path):
    """A page with a script that breaks, a picture from elsewhere, and a line that is too long."""
    path = tmp_path / "bad.html"
    path.write_text("<p style='width:900px'>x</p><img src='nothing.png'><script>broken(</script>")
    chromium.open(path, width=NARROW)
    assert len(chromium.said()) >= 2
    assert any(url.endswith("nothing.png") for url in chromium.asked())
    assert chromium.run("return document.documentElement.scrollWidth") > NARROW
