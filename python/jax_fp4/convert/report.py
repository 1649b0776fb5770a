"""What a conversion leaves behind: the table, the JSON file and the picture."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import platform
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jax_fp4
from jax_fp4.checkpoint.writing import write_atomically
from jax_fp4.convert.job import Job

NAME = "convert_report"
_COLORS = {"NVFP4": "#76b900", "MXFP4": "#d62728", "MXFP6_E2M3": "#ff7f0e", "MXFP8_E4M3": "#9467bd"}


def numbers(job: Job, seconds: float) -> dict[str, Any]:
    """Every number of a finished conversion, with its conditions."""
    tensors = [job.reports[name] for name in job.items]
    totals: dict[str, dict[str, Any]] = {}
    for t in tensors:
        total = totals.setdefault(t["format"], {"tensors": 0, "bytes_in": 0, "bytes_out": 0})
        total["tensors"] += 1
        total["bytes_in"] += t["bytes_in"]
        total["bytes_out"] += t["bytes_out"]
    return {
        "tensors": tensors,
        "totals": totals,
        "bytes_in": sum(t["bytes_in"] for t in tensors),
        "bytes_out": sum(t["bytes_out"] for t in tensors),
        "convention": job.convention,
        "seconds": seconds,
        "gigabytes_per_second": (sum(t["bytes_in"] for t in tensors) - job.resumed_bytes)
        / seconds
        / 1e9,
        "resumed_tensors": job.resumed,
        "conditions": {
            "source": str(job.source.path),
            "jax_fp4": jax_fp4.__version__,
            "jax": jax.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cpu_level": jax_fp4.cpu_level(),
            "cpus": os.cpu_count(),
        },
    }


def table(found: dict[str, Any]) -> str:
    """The report as text: a line for each tensor, then totals."""
    rows = [["tensor", "shape", "format", "method", "MB", "of input", "relative error"]]
    for t in found["tensors"]:
        stays = t["format"] == "-"
        rows.append(
            [
                t["name"],
                "x".join(map(str, t["shape"])) or "scalar",
                t["dtype"] if stays else t["format"],
                f"stays: {t['reason']}" if stays else t["method"],
                f"{t['bytes_out'] / 1e6:.3f}",
                _percent(t["bytes_out"], t["bytes_in"]),
                "" if stays else f"{t['relative_error']:.5f}",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < 4 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    total = _percent(found["bytes_out"], found["bytes_in"])
    lines.append("")
    lines.append(
        f"{found['bytes_in'] / 1e6:.1f} MB -> {found['bytes_out'] / 1e6:.1f} MB ({total}), "
        f"{found['convention']}. Relative error: |value - x| / |x|, root of the sums of squares."
    )
    return "\n".join(lines)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def write(out: Path, found: dict[str, Any]) -> list[Path]:
    """Writes the report beside the checkpoint.

    Args:
        out: the folder.
        found: what `numbers` returned.

    Returns:
        The files; without matplotlib there is no picture.
    """
    files = {
        f"{NAME}.txt": (table(found) + "\n").encode(),
        f"{NAME}.json": (json.dumps(found, indent=1) + "\n").encode(),
    }
    if importlib.util.find_spec("matplotlib") is not None:
        files[f"{NAME}.png"] = _picture(found)
    for name, data in files.items():
        write_atomically(out / name, data)
    return [out / name for name in files]


def _picture(found: dict[str, Any]) -> bytes:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    quantized = [t for t in found["tensors"] if t["format"] != "-"]
    figure, (errors, sizes) = pyplot.subplots(
        2, 1, figsize=(9, 6.5), layout="constrained", height_ratios=[3, 1]
    )
    for format in dict.fromkeys(t["format"] for t in quantized):
        points = [
            (i, 100 * t["relative_error"])
            for i, t in enumerate(found["tensors"])
            if t["format"] == format
        ]
        x, y = zip(*points, strict=True)
        errors.plot(x, y, ".", color=_COLORS.get(format), label=format, markersize=5)
    errors.set_xlabel("tensor, in the order of the checkpoint")
    errors.set_ylabel("relative error (%)")
    errors.set_ylim(0, 1.25 * max((100 * t["relative_error"] for t in quantized), default=1) or 1)
    errors.set_title(
        f"{found['bytes_in'] / 1e6:.1f} MB to {found['bytes_out'] / 1e6:.1f} MB", fontsize=11
    )
    if quantized:
        errors.legend(frameon=False, loc="upper right", ncols=4)
        worst = max(quantized, key=lambda t: t["relative_error"])
        if math.isfinite(worst["relative_error"]):
            errors.annotate(
                worst["name"],
                (found["tensors"].index(worst), 100 * worst["relative_error"]),
                xytext=(0, 6),
                textcoords="offset points",
                fontsize=8,
                ha="center",
            )
    for row, (label, key) in enumerate((("before", "bytes_in"), ("after", "bytes_out"))):
        left = 0.0
        for format, total in found["totals"].items():
            width = total[key] / 1e6
            color = "#bbbbbb" if format == "-" else _COLORS.get(format, "#17becf")
            name = "not quantized" if format == "-" else format
            sizes.barh(row, width, left=left, color=color, label=name if row == 0 else None)
            left += width
        sizes.text(left, row, f" {label}", va="center", fontsize=9)
    sizes.set_yticks([])
    sizes.invert_yaxis()
    sizes.margins(x=0.12)
    sizes.set_xlabel("MB")
    sizes.legend(frameon=False, fontsize=8, ncols=4, loc="lower right", bbox_to_anchor=(1, 0.95))
    for axis in (errors, sizes):
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    pyplot.close(figure)
    return picture.getvalue()
