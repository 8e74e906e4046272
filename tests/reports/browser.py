"""A real browser without a window: Chromium, driven by its own driver; none of it is downloaded here."""

import contextlib
import json
import shutil
import time

import pytest

ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
PROGRAMS = (("chromium", "chromium-browser", "google-chrome"), ("chromedriver", "chromium.chromedriver"))


def missing():
    """Why there is no browser here, or `None`."""
    for names in PROGRAMS:
        if not any(map(shutil.which, names)):
            return f"no {names[0]} here: install it (Debian: apt-get install chromium chromium-driver)"
    return None


@contextlib.contextmanager
def browser(profile):
    """A browser with an empty profile."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    programs = [next(filter(None, map(shutil.which, names))) for names in PROGRAMS]
    options.binary_location = programs[0]
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """What the tests ask of it."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, path, *, width, dark=False):
        """Show a file on a screen of that width, in light or in dark."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get("about:blank")
        self.said(), self.asked()
        self.driver.get(path.as_uri())
        until = time.monotonic() + 30
        while self.run("return document.URL + document.readyState") != path.as_uri() + "complete":
            assert time.monotonic() < until, "the page does not load"
            time.sleep(0.02)

    def said(self):
        """The lines of the console since this was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def asked(self):
        """The addresses that the page asked for since then, its own pages of the browser left out."""
        found = []
        for entry in self.driver.get_log("performance"):
            told = json.loads(entry["message"])["message"]
            if told["method"] == "Network.requestWillBeSent":
                found.append(told["params"]["request"]["url"])
        return [url for url in found if not url.startswith(("chrome:", "chrome-untrusted:", "about:"))]

    def run(self, script, *arguments):
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)
