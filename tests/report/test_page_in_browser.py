"""The report's page in a real browser, as wide as a telephone and as a window."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_report import row

from tfcommx.report.page import write_page

BROWSER = shutil.which("chromium")

# Put at the end of a copy of the page, in a frame: a window is never narrower than 500 pixels. The
# answer is in the page that is printed.
LOOK = """<script>
addEventListener("load", () => {
  for (const part of document.querySelectorAll("details")) part.open = true;
  const images = [...document.images], boxes = [...document.querySelectorAll("body *")];
  parent.document.getElementById("seen").textContent = JSON.stringify({
    width: innerWidth,
    page: document.documentElement.scrollWidth,
    pictures: images.map(one => one.complete ? [one.naturalWidth, one.width] : [0, 0]),
    cut: boxes.filter(one => one.scrollWidth > one.clientWidth + 1 && one.clientWidth > 0)
      .map(one => one.outerHTML.slice(0, 80)),
  });
});
</script>"""


def run(name: str, nodes: int) -> dict:
    rows = [
        row(epoch, 14, "hitopk", selection="mstopk", density=0.05, loss=1 / epoch)
        for epoch in range(1, 13)
    ]
    return {
        "name": name,
        "test_accuracy": 0.9012,
        "test_top5": 0.99,
        "ranks": 32,
        "nodes": nodes,
        "epochs": 12,
        "seconds": 4000.0,
        "counted": "word pieces",
        "throughput": 123456.0,
        "bytes_between_nodes": 2_000_000 * (nodes > 1),
        "bytes_between_nodes_dense": 10_000_000 * (nodes > 1),
        "replicas_identical": True,
        "rows": rows,
    }


@pytest.mark.exhaustive
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [400, 1100])
@pytest.mark.parametrize(("nodes", "pictures"), [(1, 5), (4, 6)])
def test_nothing_is_missing_or_cut(width: int, nodes: int, pictures: int, tmp_path: Path) -> None:
    names = ("fashion_mnist_sparse", "fashion_mnist_dense")
    (page, _) = write_page({name: run(name, nodes) for name in names}, tmp_path)
    watched = tmp_path / "watched.html"
    framed = html.escape(page.read_text().replace("</body>", f"{LOOK}</body>"))
    watched.write_text(
        f'<pre id="seen"></pre><iframe width="{width}" height="1000" style="border: 0" '
        f'srcdoc="{framed}"></iframe>'
    )
    ended = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1200,1200",
            "--dump-dom",
            watched.as_uri(),
        ],
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert "CONSOLE" not in ended.stderr
    seen = json.loads(re.search(r'<pre id="seen">(.*?)</pre>', ended.stdout, re.DOTALL)[1])
    assert seen["width"] == width and seen["page"] <= width
    assert seen["cut"] == []
    assert len(seen["pictures"]) == pictures
    for natural, shown in seen["pictures"]:
        assert natural > 100 and 300 < shown <= width
