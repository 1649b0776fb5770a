"""What a demo run leaves behind: the table, the picture and the JSON file."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import sys
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

import jax_fp4
from jax_fp4.cli import transformer
from jax_fp4.cli.corpus import Corpus
from jax_fp4.cli.saved_bytes import saved_bytes
from jax_fp4.cli.training import Config, State, write_atomically

_LAST = 0.2  # the final training loss is the mean over this part of the steps
_BASELINE = "BF16"
# One color for each recipe; the first is the baseline's.
_COLORS = {
    "BF16": "#444444",
    "NVFP4": "#76b900",
    "NVFP4_RN": "#1f77b4",
    "MXFP4": "#d62728",
    "MXFP6": "#ff7f0e",
    "MXFP8": "#9467bd",
    "FP8": "#17becf",
}


def _gap_percent(loss: float, baseline: float | None) -> float | None:
    return None if baseline is None else 100.0 * (loss / baseline - 1.0)


def results(config: Config, corpus: Corpus, state: State, parameters: int) -> dict[str, Any]:
    """Every number of a finished run, with its conditions."""
    size = transformer.SIZES[config.size]
    last = max(1, math.ceil(_LAST * config.steps))
    finals = {
        name: float(np.mean(run.losses[-last:], dtype=np.float64))
        for name, run in state.runs.items()
    }
    baseline = state.runs.get(_BASELINE)
    recipes: dict[str, Any] = {}
    for name, run in state.runs.items():
        saved = saved_bytes(size, jax_fp4.RECIPES[name])
        seconds = float(np.median(run.seconds))
        assert run.validation is not None
        recipes[name] = {
            "train_loss": finals[name],
            "train_gap_percent": _gap_percent(finals[name], finals.get(_BASELINE)),
            "validation_loss": run.validation,
            "validation_gap_percent": _gap_percent(
                run.validation, None if baseline is None else baseline.validation
            ),
            "tokens_per_second": size.tokens_per_step / seconds,
            "median_step_seconds": seconds,
            "training_seconds": float(np.sum(run.seconds)),
            "compile_seconds": run.compile_seconds,
            "saved_bytes": dataclasses.asdict(saved),
            "losses": [float(loss) for loss in run.losses],
        }
    return {
        "recipes": recipes,
        "averaged_steps": last,
        "config": dataclasses.asdict(config),
        "model": {**dataclasses.asdict(size), "parameters": parameters},
        "text": {
            "source": corpus.source,
            "files": corpus.files,
            "train_bytes": int(corpus.train.size),
            "validation_bytes": int(corpus.validation.size),
            "sha256": corpus.digest,
        },
        "conditions": {
            "command": ["python", "-m", "jax_fp4", *sys.argv[1:]],
            "resumed_at": state.resumed_at,
            "jax_fp4": jax_fp4.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.version.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cpu_level": jax_fp4.cpu_level(),
            "cpus": len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count(),
        },
    }


def write_json(path: Path, numbers: dict[str, Any]) -> None:
    """Writes the results."""
    text = json.dumps(numbers, indent=1) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(numbers: dict[str, Any]) -> str:
    """The results as a text table."""
    recipes = numbers["recipes"]
    header = (
        ("recipe", ""), ("train loss", "gap"), ("valid. loss", "gap"), ("tokens/s", ""),
        ("saved activations", "of BF16"), ("saved weights", "of BF16"),
    )  # fmt: skip
    base = recipes.get(_BASELINE, {}).get("saved_bytes")
    rows = [[" ".join(part for part in pair if part) for pair in header]]
    for name, r in recipes.items():
        cells = [name]
        for kind in ("train", "validation"):
            gap = None if name == _BASELINE else r[f"{kind}_gap_percent"]
            cells.append(
                f"{r[f'{kind}_loss']:.4f} {_cell(gap, '+.2f') + ' %' if gap is not None else '':>8}"
            )
        cells.append(f"{r['tokens_per_second']:,.0f}")
        for kind in ("linear_activations", "linear_weights"):
            count = r["saved_bytes"][kind]
            ratio = "" if base is None else f"{100.0 * count / base[kind]:.0f} %"
            cells.append(f"{count / 2**20:.2f} MiB {ratio:>6}")
        rows.append(cells)
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    other = next(iter(recipes.values()))["saved_bytes"]["other_activations"]
    notes = (
        f"Train loss: mean of the last {numbers['averaged_steps']} steps, in nats a byte.",
        "Validation: held-out text, under the recipe.",
        "Saved: what the linear layers of all blocks keep of one step for its backward pass.",
        f"Beside it, norms, attention and GELU keep {other / 2**20:.1f} MiB under every recipe (as "
        "JAX traces",
        "them; XLA recomputes some), and the optimizer holds weights and moments in float32.",
    )
    return "\n".join([*lines, "", *notes])


def _smoothed(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """(steps, running means over a window centered there, the window)."""
    window = max(1, min(len(losses), len(losses) // 20))
    means = np.convolve(losses, np.full(window, 1.0 / window), mode="valid")
    return np.arange(len(means)) + (window + 1) / 2, means, window


def write_plot(path: Path, numbers: dict[str, Any]) -> None:
    """Draws the loss curves as a PNG, and below them the gaps to the baseline."""
    # Here, so that `--help` and a run without matplotlib do not pay for it.
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    recipes = numbers["recipes"]
    compared = [name for name in recipes if name != _BASELINE] if _BASELINE in recipes else []
    ratios = [3, 1] if compared else [1]
    figure, axes = pyplot.subplots(
        len(ratios), 1, figsize=(9, 6.5), sharex=True, squeeze=False, layout="constrained",
        height_ratios=ratios,
    )  # fmt: skip
    curves, *gaps = axes[:, 0]
    smooth: dict[str, np.ndarray] = {}
    x, window = np.zeros(0), 1
    for name, r in recipes.items():
        losses = np.asarray(r["losses"])
        x, smooth[name], window = _smoothed(losses)
        label = f"{name}: train {r['train_loss']:.3f}, validation {r['validation_loss']:.3f}"
        if name in compared:
            label += f" ({r['validation_gap_percent']:+.2f} %)"
        color = _COLORS[name]
        curves.plot(np.arange(1, len(losses) + 1), losses, color=color, alpha=0.2, linewidth=0.7)
        curves.plot(x, smooth[name], color=color, linewidth=1.8, label=label)
        curves.plot(
            len(losses), r["validation_loss"], "o", color=color, markersize=5, clip_on=False
        )
    model, text = numbers["model"], numbers["text"]
    curves.set_title(
        f"Transformer with {model['parameters'] / 1e6:.2f} M parameters on {text['source']}\n"
        f"{model['layers']} layers of width {model['width']}, "
        f"{model['batch'] * model['context']:,} bytes a step, same initial weights and batches",
        fontsize=11,
    )
    curves.set_ylabel("cross-entropy (nats / byte)")
    # The first steps, at ln 256, would press the rest flat.
    settled = [value for means in smooth.values() for value in means[len(means) // 20 :]]
    lowest = min(min(r["losses"] + [r["validation_loss"]]) for r in recipes.values())
    curves.set_ylim(lowest - 0.1, max(settled) + 0.3)
    curves.legend(frameon=False, title=f"mean over {window} steps; dots: validation")
    for axis in gaps:
        for name in compared:
            gap = 100.0 * (smooth[name] / smooth[_BASELINE] - 1.0)
            axis.plot(x, gap, color=_COLORS[name], linewidth=1.5, label=name)
        axis.axhline(0.0, color=_COLORS[_BASELINE], linewidth=1.0)
        axis.set_ylabel(f"gap to {_BASELINE} (%)")
    for axis in axes[:, 0]:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("step")
    axes[-1, 0].set_xlim(0, len(next(iter(recipes.values()))["losses"]))
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150))
    pyplot.close(figure)
