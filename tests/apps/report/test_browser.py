"""The page of a run in a real browser: drawn, readable at a laptop's size, without a complaint on the console."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import pipedream as pd
from pipedream.apps.report.html import page
from tests.apps.report.conftest import Simulated

pytestmark = pytest.mark.browser
Opened = Callable[..., tuple[dict[str, Any], list[str]]]

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--hide-scrollbars"),
)

# What the test asks of the page; it is added to a copy, the page itself has no script.
QUESTION = """<script>
const box = e => { const r = e.getBoundingClientRect(); return [r.x, r.y, r.width, r.height].map(Math.round) };
const all = s => [...document.querySelectorAll(s)];
document.body.dataset.answer = JSON.stringify({
  page: [document.documentElement.scrollWidth, innerWidth],
  timelines: all('.timelines svg').map(box), ops: all('.timelines rect.op').length,
  drawn: all('.timelines rect.op').filter(e => e.getBoundingClientRect().width > 0).length,
  scrolls: all('.timelines').map(e => [e.scrollWidth, e.clientWidth]),
  pictures: all('.fits').map(e => [e.scrollWidth, e.clientWidth]),
  rows: all('table').map(t => [t.parentNode.ariaLabel, t.rows.length, ...box(t).slice(2)]),
  cards: all('.card').map(box), curve: all('polyline.curve').map(box),
  fonts: all('.timelines text').map(e => parseFloat(getComputedStyle(e).fontSize)),
});
</script></body>"""


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    """Returns the function that opens a page, and gives what it answers and what the console said."""

    def run(text: str, *flags: str) -> tuple[dict[str, Any], list[str]]:
        chromium = shutil.which("chromium")
        assert chromium, "the marker skips this test where chromium is missing"
        file = tmp_path / "report.html"
        file.write_text(text.replace("</body>", QUESTION), encoding="utf-8")
        done = subprocess.run(
            [chromium, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1366,768", *flags,
             "--dump-dom", file.as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        answer = re.search(r'data-answer="([^"]*)"', done.stdout)
        assert answer, f"the page did not answer: {done.stderr[-2000:]}"
        return json.loads(unescape(answer[1])), [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return run


@pytest.fixture
def report(simulated: Simulated, digits_plan: pd.Plan, measured: pd.Timeline) -> str:
    stages = [{"layers": list(stage.names), "rank": s, "busy_share": 0.9} for s, stage in enumerate(digits_plan.stages)]
    return page(
        {"recipe": "examples/digits.py", "schedule": "pipedream", "metrics": {"accuracy": 0.97}, "stages": stages},
        plan=digits_plan,
        predicted=simulated("pipedream", total=120, plan=digits_plan),
        measured=measured,
        losses=[(k, 2.0 / (1 + k)) for k in range(120)],
    )


def test_the_page_is_drawn(opened: Opened, report: str) -> None:
    answer, console = opened(report)
    assert console == []
    width, window = answer["page"]
    assert width <= window == 1366, "the page scrolls sideways; only its boxes may"
    assert len(answer["timelines"]) == 4
    for first, second in (answer["timelines"][:2], answer["timelines"][2:]):
        assert (first[0], first[2]) == (second[0], second[2]), "predicted and measured are not one above the other"
        assert first[1] + first[3] <= second[1]
        assert first[3] > 100
    assert answer["drawn"] == answer["ops"] > 100
    assert min(answer["fonts"]) >= 10
    captions = {caption.split(":")[0].split(" ")[0]: rows for caption, rows, *_ in answer["rows"]}
    assert captions == {"Stages": 3, "Plan": 3, "Configuration": 2, "Versions": 2}
    assert all(width > 200 and height > 40 for *_, width, height in answer["rows"])
    assert answer["curve"][0][2] > 900
    assert len(answer["pictures"]) == 3
    assert all(inside <= outside for inside, outside in answer["pictures"]), "a picture is cut off at the right"
    assert all(y + height < 768 for _, y, _, height in answer["cards"]), "key figures are on the first screen"


def test_a_long_timeline_scrolls_in_its_box(opened: Opened, simulated: Simulated) -> None:
    many = simulated("gpipe", stages=6, split=20, total=80, backward_s=0.2, forward_s=0.1)
    answer, _ = opened(page({}, predicted=many))
    assert answer["page"][0] <= answer["page"][1]
    assert all(inside > outside for inside, outside in answer["scrolls"])


def test_this_test_would_see_an_error(opened: Opened, report: str) -> None:
    _, console = opened(report.replace("</body>", "<script>broken(</script></body>"))
    assert ["Uncaught SyntaxError" in line for line in console] == [True]
