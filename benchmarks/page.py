"""How soon the page of `meshwise ui` is there, and how long a move of a slider takes until it is redrawn.

python benchmarks/page.py

Needs Chromium and the extra `test`. A server is started afresh for each view, so that the first move is the first.
"""

from __future__ import annotations

import shutil
import socket
import statistics
import subprocess
import sys
import time

from playwright.sync_api import Page, sync_playwright

VIEWS = (
    "/roofline",
    "/shard",
    "/model",
    "/book?problem=roofline.q2.Bcrit",
    "/train?model=llama-3-70b&on=h100:64&batch-tokens=1Mi&seq-len=8192&layout=tensor=8,data=8&changes=no",
    "/serve?model=llama-3-70b&on=h100:8&batch=64&layout=tensor=8&prompt=1024&output=256&changes=no",
)

#: Moves one slider there and back, and gives the milliseconds from each move to its answer in the page.
MOVES = """async () => {
  const times = [];
  for (const name of [...document.querySelectorAll('.stop .name')].map(n => n.textContent)) {
    for (const step of [1, -1, 1, -1]) {
      const row = [...document.querySelectorAll('.stop')].find(r => r.querySelector('.name').textContent === name);
      const slider = row.querySelector('input'), at = Number(slider.value);
      const to = at + step > slider.max || at + step < slider.min ? at - step : at + step;
      if (to < slider.min || to > slider.max) continue;
      const began = performance.now(), answer = document.querySelector('#answer');
      slider.value = to;
      slider.dispatchEvent(new Event('input'));
      while (answer.isConnected) await new Promise(requestAnimationFrame);
      times.push(performance.now() - began);
    }
  }
  return times;
}"""


def measured(page: Page, view: str) -> tuple[float, list[float]]:
    """Seconds until a new server answers, and milliseconds of the moves on a view."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    words = [sys.executable, "-m", "meshwise", "ui", "--no-browser", "--port", str(port)]
    server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)  # noqa: S603
    try:
        assert server.stderr is not None
        server.stderr.readline()
        ready = time.perf_counter() - began
        page.goto(f"http://127.0.0.1:{port}{view}")
        page.wait_for_selector(".stop input[type=range]")
        return ready, page.evaluate(MOVES)
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    """Print a line a view, and the whole."""
    path = next(p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name)))
    everything, starts = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        for view in VIEWS:
            ready, moves = measured(page, view)
            starts.append(ready)
            everything += moves
            median = statistics.median(moves)
            print(f"{view}\n  first move {moves[0]:.0f} ms, of {len(moves)} moves the median {median:.0f} ms")
        browser.close()
    p95 = statistics.quantiles(everything, n=20)[-1]
    print(f"ready in {statistics.median(starts):.2f} s; of {len(everything)} moves 95 % within {p95:.0f} ms")


if __name__ == "__main__":
    main()
