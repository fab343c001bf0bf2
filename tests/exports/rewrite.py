"""Rewrites the expected texts: `python -m tests.exports.rewrite`. Read the difference afterwards."""

from meshwise.exports import hand_over
from meshwise.exports.serving import hand_over_serving
from tests.exports.plans import CASES, DATA, HANDED
from tests.exports.serving_plans import SERVED, serving_plan

if __name__ == "__main__":
    for case, tool in HANDED:
        handed = hand_over(CASES[case][0](), tool)
        (DATA / f"{case}.{tool}.txt").write_text(handed.text, encoding="utf-8")
    for case, engine in SERVED:
        handed = hand_over_serving(serving_plan(case), engine)
        (DATA / f"{case}.{engine}.txt").write_text(handed.text, encoding="utf-8")
