"""Draws bench_growth.py's curves: runs in an environment with matplotlib alone.

    plot_side.py PICTURE < CURVES

CURVES is JSON: {"lengths", "sizes", "ours", "peer"}; ours and peer {"by_length", "by_size"} in
microseconds, peer null where there is none; it may end at a smaller size.
"""

import json
import sys

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

OURS, PEER, GUIDE = "#0b6e4f", "#c75000", "#9a9a9a"


def panel(axes, xs, curves, key, guide, called):  # type: ignore[no-untyped-def]
    for name, colour, one in curves:
        ys = one[key]
        last = f"{ys[-1]:,.0f}" if ys[-1] >= 10 else f"{ys[-1]:.1f}"
        label = f"{name}: {last} µs at {xs[len(ys) - 1]:,}"
        axes.loglog(xs[: len(ys)], ys, "o-", color=colour, markersize=4, linewidth=1.8, label=label)
    axes.loglog(xs, guide(xs, curves[0][2][key]), "--", color=GUIDE, linewidth=1, label=called)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    axes.set_ylabel("µs a match")
    axes.grid(which="major", color="#e5e5e5")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main():  # type: ignore[no-untyped-def]
    said = json.load(sys.stdin)
    curves = [("kvroute", OURS, said["ours"])]
    if said["peer"]:
        curves.append(("Dynamo's RadixTree", PEER, said["peer"]))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    panel(
        left,
        said["lengths"],
        curves,
        "by_length",
        lambda xs, ys: [ys[-1] * x / xs[-1] for x in xs],
        "linear",
    )
    left.set_ylim(0.3, 3000)
    left.set_title("Longer prompts (820,000 blocks, 8 workers)", fontsize=11)
    left.set_xlabel("blocks of the prompt")
    panel(right, said["sizes"], curves, "by_size", lambda xs, ys: [ys[0] for _ in xs], "flat")
    right.set_title("A larger index (prompts of 512 blocks, 8 workers)", fontsize=11)
    right.set_xlabel("blocks in the index")
    right.set_ylim(0.3, 300)
    figure.savefig(sys.argv[1], dpi=130)


main()
