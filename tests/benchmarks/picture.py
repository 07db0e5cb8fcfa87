"""The picture of the benchmark: seconds over the floor's, by setting and contestant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from speed import Result

mpl.rcParams["svg.hashsalt"] = "shardplan"  # the same ids in every drawing of the same numbers
mpl.rcParams["svg.fonttype"] = "none"
CONTESTANTS = {
    "shardplan": ("shardplan", "#1b6ca8"),
    "per-linear": ("parallelize_module, a style for each linear", "#d98c3f"),
    "transformers": ("transformers' own tp_plan", "#8a6fb0"),
    "floor again": ("the floor against itself", "#b5b5b5"),
}


def draw(results: Sequence[Result], picture: Path) -> None:
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    alone, with_fsdp2 = figure.subplots(2, 1, sharex=False)
    _panel(alone, [r for r in results if not r.fsdp2], "tp=2")
    _panel(with_fsdp2, [r for r in results if r.fsdp2], "dp=1,tp=2, FSDP2 on every contestant")
    handles, labels = alone.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(picture, metadata={"Date": None})


def _panel(axes: Axes, results: Sequence[Result], title: str) -> None:
    settings = list(dict.fromkeys(result.setting for result in results))
    shown = [name for name in CONTESTANTS if any(result.contestant == name for result in results)]
    width = 0.8 / max(len(shown), 1)
    for number, name in enumerate(shown):
        own = {result.setting: result for result in results if result.contestant == name}
        places = [settings.index(setting) + (number - (len(shown) - 1) / 2) * width for setting in own]
        ratios = [result.ratio for result in own.values()]
        spread = [[r.ratio - r.low for r in own.values()], [r.high - r.ratio for r in own.values()]]
        label, color = CONTESTANTS[name]
        axes.bar(places, ratios, width, label=label, color=color, yerr=spread, error_kw={"lw": 0.8})
        for place, ratio, high in zip(places, ratios, (r.high for r in own.values()), strict=True):
            axes.annotate(f"{ratio:.2f}", (place, high), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    axes.axhline(1, color="black", lw=0.8)
    axes.set_xticks(range(len(settings)), settings)
    axes.set_xlabel("hidden, sequence, batch")
    axes.set_ylabel("seconds over the floor's")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
