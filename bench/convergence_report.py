"""The report of bench/convergence.py: the table, README.md, and the picture, convergence.png."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from convergence_results import FINAL_STEPS, Results, read

from jax_fp4.cli.training import write_atomically

PUBLISHED_GAP = 0.026
"""Nats, mean over 10,000 steps of Llama 3 8B on C4, NVFP4 against FP8.

Reported of NVIDIA's blog on training with JAX and MaxText in NVFP4, June 2026.
"""

_COLORS = {
    "BF16": "#444444",
    "FP8": "#17becf",
    "MXFP8": "#9467bd",
    "NVFP4": "#76b900",
    "NVFP4_4over6": "#1f77b4",
    "MXFP4": "#d62728",
}
_BUG_COLORS = ("#8c564b", "#e377c2", "#bcbd22", "#ff7f0e", "#7f7f7f")


# ---- The table -----------------------------------------------------------------------------------


def _nats(value: float | None) -> str:
    return "" if value is None else f"{value:+.4f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _recipe_row(results: Results, name: str, seed: int) -> list[str]:
    run, last = results.runs[name, seed], results.final_points()
    cells = [name, str(seed), f"{results.final_loss(name, seed):.4f}"]
    for baseline in ("FP8", "BF16"):
        gaps = results.gaps(name, seed, baseline)
        cells.append(_nats(None if gaps is None else gaps.mean()))
        cells.append(_nats(None if gaps is None else gaps[-last:].mean()))
    base = results.runs.get(("BF16", seed))
    cells.append(f"{run['validation_loss']:.4f}")
    gap = (
        None if base is None or name == "BF16" else run["validation_loss"] - base["validation_loss"]
    )
    cells.append(_nats(gap))
    cells.append("" if gap is None else f"{100 * gap / base['validation_loss']:+.2f} %")
    return cells


def _bug_row(results: Results, name: str, seed: int) -> list[str]:
    run, last = results.runs[name, seed], results.final_points()
    cells = [run["bug"], str(run["steps_done"]), f"{results.final_loss(name, seed):.4f}"]
    for baseline in ("NVFP4", "BF16"):
        gaps, base = results.gaps(name, seed, baseline), results.losses(baseline, seed)
        if gaps is None:
            cells += ["", ""]
            continue
        until = slice(len(gaps) - last, len(gaps))
        cells += [
            _nats(gaps[until].mean()),
            f"{100 * gaps[until].mean() / base[until].mean():+.1f} %",
        ]
    return cells


def _bands(results: Results) -> list[str]:
    lines = []
    for name in ("BF16", "NVFP4"):
        seeds = results.seeds(name)
        finals = [results.final_loss(name, seed) for seed in seeds]
        if len(seeds) > 1:
            low, high = min(finals), max(finals)
            lines.append(
                f"* {name}, seeds {', '.join(map(str, seeds))}: final training loss {low:.4f} to "
                f"{high:.4f}, a band of {high - low:.4f}."
            )
    pairs = {seed: results.gaps("NVFP4", seed, "BF16") for seed in results.seeds("NVFP4")}
    means = [
        f"{_nats(gaps.mean())} (seed {seed})" for seed, gaps in pairs.items() if gaps is not None
    ]
    if means:
        lines.append(f"* Mean gap of NVFP4 to BF16 of the same seed: {', '.join(means)}.")
    return lines


def _published(results: Results) -> str:
    gaps = results.gaps("NVFP4", 0, "FP8")
    if gaps is None:
        return "The mean gap of NVFP4 to FP8 needs both runs of seed 0, and one is missing."
    quarters = ", ".join(_nats(float(part.mean())) for part in np.array_split(gaps, 4))
    percent = 100 * gaps.mean() / results.losses("FP8", 0)[: len(gaps)].mean()
    return (
        f"**Mean gap of the NVFP4 recipe to FP8 over the run: {gaps.mean():+.4f} nats** a byte, "
        f"{percent:+.1f} % (published: {PUBLISHED_GAP:+.3f} a token). By quarters of the run: "
        f"{quarters}; in the last {FINAL_STEPS} steps "
        f"{gaps[-results.final_points() :].mean():+.4f}."
    )


def markdown(results: Results, plan: Sequence[tuple[str, int]]) -> str:
    """README.md of the results, with what is missing of ``plan``, pairs of name and seed."""
    some = next(iter(results.runs.values()))
    model, text, conditions = some["model"], some["text"], some["conditions"]
    recipes = [key for key in plan if key in results.runs and results.runs[key]["bug"] is None]
    bugs = [key for key in plan if key in results.runs and results.runs[key]["bug"] is not None]
    missing = [f"{name} (seed {seed})" for name, seed in plan if (name, seed) not in results.runs]
    tokens = model["batch"] * model["context"]
    machines = sorted({run["conditions"]["machine"] for run in results.runs.values()})
    levels = sorted({run["conditions"]["cpu_level"] for run in results.runs.values()})
    dates = sorted({run["conditions"]["date"] for run in results.runs.values()})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    minutes = [run["conditions"]["training_seconds"] / 60 for run in results.runs.values()]
    millions = model["parameters"] / 1e6
    header = (
        "recipe", "seed", "train loss", "mean gap to FP8", "final gap to FP8", "mean gap to BF16",
        "final gap to BF16", "validation loss", "gap to BF16", "",
    )  # fmt: skip
    bug_header = (
        "planted in NVFP4", "steps", "train loss", "gap to NVFP4", "", "gap to BF16", "",
    )  # fmt: skip
    parts = [
        "# Loss over 10,000 steps",
        "Written by `python bench/convergence.py report`; each row is a file here, with its "
        "command and conditions. All losses are nats a byte. One row again:\n\n"
        "```console\n$ python bench/convergence.py run --recipe NVFP4 --seed 0\n```",
        f"A byte-level transformer, {millions:.2f} M parameters ({model['layers']} layers, width "
        f"{model['width']}, MLP {model['hidden']}), {some['steps']:,} steps of {tokens} bytes "
        f"({some['steps'] * tokens / model['parameters']:.0f} bytes a parameter) of "
        f"{text['source']} ({text['train_bytes'] / 1e6:.1f} MB), AdamW with a peak rate of "
        f"{model['learning_rate']}, {some['steps'] // 10:,} steps of warm-up, then a cosine. Every "
        f"run of a seed has the same initial weights and batches. {', '.join(machines)}, CPU level "
        f"{' or '.join(levels)}, jax {conditions['jax']}, {days}; {min(minutes):.0f} to "
        f"{max(minutes):.0f} minutes a run, beside other work on the machine. The text is that of "
        f"Python {conditions['python']}; results on another text are not mixed with these.",
        _published(results),
        _table(header, [_recipe_row(results, *key) for key in recipes]),
        f"Train loss and final gaps: mean of the last {FINAL_STEPS} steps. Validation: "
        f"{some['validation_tokens'] / 1e3:.0f} kB of held-out text, under the recipe.",
        "\n".join(_bands(results)),
        "![loss curves and gaps](convergence.png)",
    ]
    differences = _DIFFERENCES.format(
        millions=millions,
        width=model["width"],
        layers=model["layers"],
        source=text["source"],
        tokens=tokens,
    )
    if bugs:
        parts += [
            "## Planted bugs",
            "The same NVFP4 run with a bug, stopped early; gaps over the last "
            f"{FINAL_STEPS} of these steps.",
            _table(bug_header, [_bug_row(results, *key) for key in bugs]),
        ]
    parts += ["## What differs from the published experiment", differences]
    if missing:
        parts += [
            "## Missing",
            f"No result yet: {', '.join(missing)}. `python bench/convergence.py all` runs them, "
            "and goes on where an earlier run stopped.",
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


# Its rows are lines of a table, so that they may be long.
_DIFFERENCES = """\
| | published | here |
|---|---|---|
| model | Llama 3 8B: width 4096, 32 layers, gated MLP | {millions:.2f} M parameters: width {width}, {layers} layers, GELU |
| text, unit | C4, subword tokens | {source}, bytes |
| bytes or tokens a step | not known to us; 32,768 a GPU in the public script | {tokens} |
| NVFP4 | Transformer Engine, on a GPU; the public script leaves the Hadamard transform out | the full recipe, on a CPU |
| FP8 | Transformer Engine's | E4M3 and E5M2, the scale of the current tensor |
| left in bf16 | head and embedding | the same; every block is quantized |
| schedule | not known to us | warm-up, and a cosine over all steps |

A nat a byte is not a nat a token: a subword token holds about four bytes. Narrow layers have few blocks
in a sum, and few tokens in a step make noisy gradients; both change what quantization costs. So sign and
order of the gaps can be compared with the published figure, their size only roughly."""  # noqa: E501


# ---- The picture ---------------------------------------------------------------------------------


def _smooth(values: np.ndarray, window: int = 5) -> np.ndarray:
    """Running means, shorter at both ends."""
    sums = np.convolve(values, np.ones(window), mode="same")
    return sums / np.convolve(np.ones(len(values)), np.ones(window), mode="same")


def draw(path: Path, results: Results) -> None:
    """Loss curves of all runs, and below them their gaps to FP8 (or else BF16), as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    baseline = "FP8" if ("FP8", 0) in results.runs else "BF16"
    step = next(iter(results.runs.values()))["averaged_steps"]
    figure, (curves, gaps) = pyplot.subplots(
        2, 1, figsize=(10, 9), sharex=True, layout="constrained", height_ratios=[1, 1]
    )
    bug_colors = iter(_BUG_COLORS * 2)
    names = dict.fromkeys(name for name, _ in sorted(results.runs, key=lambda key: key[0]))
    settled = []
    for name in sorted(names, key=lambda name: [*_COLORS, name].index(name)):
        seeds = results.seeds(name)
        bug = results.runs[name, seeds[0]]["bug"]
        style = {
            "color": _COLORS[name] if bug is None else next(bug_colors),
            "linestyle": "-" if bug is None else "--",
            "linewidth": 1.4,
        }
        all_losses = [_smooth(results.losses(name, seed)) for seed in seeds]
        length = min(map(len, all_losses))
        x = (np.arange(length) + 0.5) * step
        stack = np.stack([losses[:length] for losses in all_losses])
        label = name if bug is None else f"bug: {bug}"
        curves.plot(x, stack[0], label=label, **style)
        settled += [stack[0, length // 10 :]] if bug is None else []
        if len(seeds) > 1:
            curves.fill_between(
                x, stack.min(axis=0), stack.max(axis=0), color=style["color"], alpha=0.15, lw=0
            )
        difference = results.gaps(name, seeds[0], baseline)
        if difference is not None:
            at = (np.arange(len(difference)) + 0.5) * step
            gaps.plot(at, _smooth(difference), label=label, **style)
    if settled:
        everything = np.concatenate(settled)
        curves.set_ylim(everything.min() - 0.05, everything.max() + 0.7)
    gaps.axhline(0, color="#444444", linewidth=0.8)
    gaps.axhline(
        PUBLISHED_GAP, color="black", linestyle=":", label=f"published mean {PUBLISHED_GAP:+.3f}"
    )
    # Linear where recipes are, logarithmic where bugs are.
    gaps.set_yscale("symlog", linthresh=0.1)
    gaps.set_yticks([-0.1, -0.05, 0, 0.05, 0.1, 0.3, 1, 3], minor=False)
    gaps.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    gaps.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    curves.set_ylabel("training loss (nats / byte)")
    shaded = "; shaded: all seeds" if any(len(results.seeds(name)) > 1 for name in names) else ""
    curves.set_title(f"Same initial weights and batches{shaded}", fontsize=11)
    gaps.set_ylabel(f"gap to {baseline} of the same seed (nats / byte)")
    gaps.set_xlabel("step")
    for axis in (curves, gaps):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    curves.legend(frameon=False, ncols=2)
    gaps.legend(frameon=False, ncols=3, fontsize=8)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=110))
    pyplot.close(figure)


def write(folder: Path, plan: Sequence[tuple[str, int]]) -> None:
    """Writes README.md and convergence.png beside the results."""
    results = read(folder)
    text = markdown(results, plan)
    write_atomically(folder / "README.md", lambda file: file.write(text.encode()))
    draw(folder / "convergence.png", results)
    print(text)
