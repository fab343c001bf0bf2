"""Rewrites the expected texts: `PYTHONPATH=src python tests/exports/rewrite.py`. Read the difference afterwards."""

from plans import CASES, DATA, HANDED
from serving_plans import SERVED, serving_plan

from meshwise.exports import hand_over, hand_over_serving

if __name__ == "__main__":
    for case, tool in HANDED:
        handed = hand_over(CASES[case][0](), tool)
        (DATA / f"{case}.{tool}.txt").write_text(handed.text, encoding="utf-8")
    for case, engine in SERVED:
        handed = hand_over_serving(serving_plan(case), engine)
        (DATA / f"{case}.{engine}.txt").write_text(handed.text, encoding="utf-8")
