"""Plots of `jdp bench scaling`: how does the speed grow with the processes?"""

import pathlib
from typing import Any

from jdp.bench import plots


def write(result: dict[str, Any], path: pathlib.Path) -> None:
    """Draws samples per second, and their share of the speed without communication."""
    records = result["processes"]
    counts = [record["num_processes"] for record in records]
    names = dict.fromkeys(name for r in records for name in r["systems"])
    with plots.saved(path, columns=2) as (speed, share):
        for i, name in enumerate(names):
            found = [r for r in records if name in r["systems"]]
            x = [r["num_processes"] for r in found]
            rows = [r["systems"][name] for r in found]
            is_alone = "no communication" in name
            style = {
                "marker": "o",
                "linestyle": "--" if is_alone else "-",
                "linewidth": 3 if name == "jdp" else 1,
                "color": f"C{i % 10}",
                "label": name,
            }
            speed.plot(x, [row["samples_per_s"] for row in rows], **style)
            if not is_alone:
                share.plot(x, [row["over_alone"] for row in rows], **style)
        for axis in (speed, share):
            axis.set_xticks(counts)
            axis.set_xlabel("processes")
            axis.set_ylim(bottom=0)
            axis.grid(True, alpha=0.3)
        speed.set_ylabel("samples per second, all processes")
        share.set_ylabel("speed / speed without communication")
        share.legend(
            *speed.get_legend_handles_labels(),
            fontsize="small",
            loc="center left",
            bbox_to_anchor=(1.02, 0.5),
        )
