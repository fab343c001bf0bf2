"""What a row of `score` takes, in CPU-milliseconds, over the rows that come with the package.

python benchmarks/score.py            both kinds
python benchmarks/score.py --check    the same; exit code 1 where a thousand rows would take more than 5 CPU-seconds

Models, blocks and engines are read and placed on the way, as in a first run. What is loaded is not looked through for
garbage, as on the command line.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time

from meshwise.scoring import ServingRun, TrainingRun, score_serving, score_training, shipped_rows

#: The bar, CPU-milliseconds of a row.
MOST = 5.0


def main() -> int:
    """Score each kind once, in a fresh process, and print what a row took."""
    parser = argparse.ArgumentParser(description="CPU-milliseconds of a row of score.")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 where a row takes more than {MOST:g} ms")
    check, over = parser.parse_args().check, False
    training, serving = shipped_rows(TrainingRun), shipped_rows(ServingRun)
    gc.freeze()
    for name, run in (("training", lambda: score_training(training)), ("serving", lambda: score_serving(serving))):
        began = time.process_time()
        rows = run().rows
        each = 1e3 * (time.process_time() - began) / rows
        over |= each > MOST
        print(f"{name}: {rows:,} rows, {each:.1f} ms each")
    return 1 if check and over else 0


if __name__ == "__main__":
    sys.exit(main())
