"""The documentation site: it builds without a warning, and every page opens in a browser without an error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from paceline.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


class Handler(SimpleHTTPRequestHandler):
    """Serves the site."""

    def do_GET(self) -> None:
        """A file; `/slow` is empty, and takes 3 s."""
        if self.path != "/slow":
            return super().do_GET()
        time.sleep(3)
        self.send_response(204)
        return self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Keep the log empty."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site; built in a copy, as `make docs` does in the repository."""
    copy = tmp_path_factory.mktemp("site") / "repository"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))
    helps = copy / "build" / "help"
    helps.mkdir(parents=True)
    texts = {f"{command}.txt": (command, "--help") for command in COMMANDS}
    for file, words in (texts | {"messages.md": ("explain", "--all")}).items():
        done = subprocess.run(
            [sys.executable, "-m", "paceline", *words],
            env=os.environ | {"COLUMNS": "92"},
            capture_output=True,
            text=True,
            check=True,
        )
        (helps / file).write_text(done.stdout)
    zensical = Path(sys.executable).with_name("zensical")
    built = subprocess.run(
        [str(zensical), "build", "--strict", "--clean"],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return copy / "build" / "site"


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """The address of a folder on a free port of loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def console(url: str, profile: Path, *, budget_ms: int = 4000) -> str:
    """What a page writes to the browser's console."""
    done = subprocess.run(
        [
            *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu"),
            *("--enable-logging=stderr", f"--user-data-dir={profile}"),
            *(f"--virtual-time-budget={budget_ms}", "--dump-dom", url),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "</html>" in done.stdout, url
    return "".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_every_page_opens_without_an_error(site: Path, tmp_path: Path) -> None:
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    assert len(pages) >= len(list((ROOT / "docs").rglob("*.md")))
    with serve(site) as address, ThreadPoolExecutor(2) as pool:
        said = pool.map(
            lambda page: console(f"{address}/{page}", tmp_path / page.replace("/", "-")), pages
        )
        errors = {page: text for page, text in zip(pages, said, strict=True) if text}
    assert errors == {}


SEARCH = """<script>
// The browser's virtual time waits for an answer of the server, and not for a worker.
const pause = () => fetch("/slow").catch(() => {});
setTimeout(async () => {
  await pause();
  document.querySelector(".md-search__button").click();
  await pause();
  const root = [...document.querySelectorAll("*")].map((e) => e.shadowRoot).find(Boolean);
  const input = root.querySelector("input");
  input.value = "checkpoint";
  input.dispatchEvent(new InputEvent("input", { bubbles: true }));
  await pause();
  setTimeout(() => {
    const links = [...root.querySelectorAll("a")].map((a) => a.href);
    console.log("FOUND " + links.map((link) => link.split("/site/").pop()).join(" "));
  }, 2000);
}, 1000);
</script></body>"""


@pytest.mark.parametrize("over", ["file", "http"])
def test_the_search_finds_english_pages(over: str, site: Path, tmp_path: Path) -> None:
    page = site / "search_of_a_test.html"
    page.write_text((site / "index.html").read_text().replace("</body>", SEARCH))
    try:
        with serve(site) as address:
            start = address if over == "http" else site.as_uri()
            said = console(f"{start}/{page.name}", tmp_path / "profile", budget_ms=12_000)
    finally:
        page.unlink()
    found = said.partition("FOUND ")[2].partition('"')[0].split()
    assert "howto/checkpoints.html" in found[0], said
    assert not [link for link in found if "zh/" in link]
