"""Makes the pictures of the documentation, in light and dark: `make screenshots`.

    python -m support.screenshots [charts] [groups] [overview]     # some of them only

Overview: a tiny model learns sums, with the local engine and the trainer. Groups and tokens: a file
of `process` with the simulated engine. Charts: from the tables of recorded proofs and benchmarks.
"""

import sys
import tempfile
from functools import partial
from io import BytesIO
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import expect

from support.browsers import ROOT, Visitor, running_chromium
from support.charts import cpu_bars, learning_curves, long_curves
from support.commands import running, typed
from support.learning import learning, tiny_model

DOCS = ROOT / "docs"
CHARTS = {
    "benchmarks": (cpu_bars, "docs/benchmarks.md"),
    "learning": (learning_curves, "clients/envserver_clients/training/README.md"),
    "long": (long_curves, "tests/benchmarks/README.md"),
}
PROCESS = "process --env mhqa,code --model sim --env.include_messages true --out groups.jsonl"
LEARN = "--task arithmetic --groups 8 --learning-rate 5e-5 --until-reward 2 --minutes 60"
STEPS = 300
SIZE = {"width": 1280, "height": 720}


def charts(folder: Path) -> None:
    for name, (draw, page) in CHARTS.items():
        (DOCS / f"{name}.svg").write_text(draw((ROOT / page).read_text()))


def groups(folder: Path) -> None:
    typed(f"{PROCESS} --env.group_size 4 --limit 12", folder)
    with running("view", "groups.jsonl", folder=folder) as view:
        url = view.wait_for(r"http://[\d.:]+")[0]
        group, short = (view.until(partial(first, url, name)) for name in ("mhqa", "code"))
        shoot("group", group, "Rollout 0")
        # Token 147 is sampled, and was unlikely.
        shoot("tokens", f"{short}/0?tab=tokens&token=147", "logprob")


def first(url: str, environment: str) -> str:
    """The page of its first group; "" while the file is being read."""
    answer = httpx.get(f"{url}/v1/groups", params={"limit": 50}).raise_for_status().json()
    ids = sorted(one["group_id"] for one in answer["groups"] if one["env"] == environment)
    return f"{url}/#/groups/{ids[0]}" if len(answer["groups"]) == 12 else ""


def overview(folder: Path) -> None:
    python = ROOT / ".venv-learn" / "bin" / "python"
    with learning(python, tiny_model(python), folder / "learn", *LEARN.split()) as run:
        run.wait_for_step(STEPS)
        url = run.process.wait_for(r"server (http://[\d.:]+)")[1]
        shoot("overview", f"{url}/#/?range=15m", "Learning")


def shoot(name: str, url: str, shown: str) -> None:
    """Keeps the page at `url` in both looks, once it shows a text."""
    with running_chromium() as browser:
        visitor = Visitor(browser, name)
        for look in ("light", "dark"):
            page = visitor.page(url, color_scheme=look, viewport=SIZE, device_scale_factor=1.5)
            expect(page.get_by_text(shown, exact=True).first).to_be_visible()
            page.wait_for_timeout(2000)  # what else the page reads
            picture = Image.open(BytesIO(page.screenshot(animations="disabled"))).convert("RGB")
            place = DOCS / f"{name}-{look}.webp"
            picture.quantize(256).save(place, lossless=True, method=6)
        if faults := visitor.finish():
            raise SystemExit("\n".join(faults))


if __name__ == "__main__":
    made = {"charts": charts, "groups": groups, "overview": overview}
    with tempfile.TemporaryDirectory() as temporary:
        (runs := Path(temporary) / "runs").mkdir()
        for picture in sys.argv[1:] or made:
            made[picture](runs)
