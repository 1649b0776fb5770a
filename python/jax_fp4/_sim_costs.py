"""What a launch costs on the PTX machine: counts, modelled cycles, a timeline."""

from __future__ import annotations

import dataclasses
import heapq
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True)
class CostModel:
    """What is counted and modelled besides running a kernel.

    Attributes:
        time: model cycles. The schedule is then that of the modelled times, the same for all seeds.
        timeline: keep the intervals of warps and engines, for `Costs.save_trace`.
        data: whether asynchronous engines move bytes and tensor cores multiply. Without, a large
            product takes seconds; results mean nothing, memory and races are not checked, and a
            kernel's control flow must not depend on what it copies in bulk or multiplies.
        sms: multiprocessors; None: the chip's.
        ctas_per_sm: at most; None: what threads and shared memory allow. Registers are not known.
    """

    time: bool = False
    timeline: bool = False
    data: bool = True
    sms: int | None = None
    ctas_per_sm: int | None = None

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.timeline and not self.time:
            raise ValueError("timeline: intervals have times; pass time=True as well")
        if not self.data and not self.time:
            raise ValueError("data: False is for modelled times; pass time=True as well")
        for name in ("sms", "ctas_per_sm"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected 1 or more, got {value}")

    def native(self) -> tuple[bool, bool, bool, bool, int, int]:
        """The arguments of the extension."""
        return True, self.time, self.timeline, self.data, self.sms or 0, self.ctas_per_sm or 0


OFF = (False, False, False, True, 0, 0)


class Interval(NamedTuple):
    """Something that took time.

    Attributes:
        track: "warp" (its whole life), "wait" (inside that), "tensor", "tensor copy", "copy in",
            "copy out".
        cta: position in `Timing.ctas`.
        warp: of the CTA; for engines the warp that asked.
        line: of the PTX text.
        begin: in cycles.
        end: in cycles.
        name: what a warp waited for, or what an engine did.
    """

    track: str
    cta: int
    warp: int
    line: int
    begin: float
    end: float
    name: str


class CtaPlace(NamedTuple):
    """Where and when a CTA ran: its index, its multiprocessor, cycles."""

    x: int
    y: int
    z: int
    sm: int
    begin: float
    end: float


@dataclass(frozen=True)
class Timing:
    """Modelled times; docs/simulator.md, "Costs", says what they are worth.

    Attributes:
        cycles: from the launch to the end of the grid's last CTA or write.
        seconds: the same at the chip's boost clock.
        sms: multiprocessors of the chip.
        used_sms: that had a CTA.
        ctas_per_sm: that fit.
        tensor_busy: share of `cycles` for which the tensor cores of the used SMs multiply, for
            tcgen05.mma or mma.sync.
        tensor_busy_steady: the same between an SM's first MMA and its last.
        issue_busy: share of the issue slots of the used SMs that are used.
        l2_read: bytes of sectors read from L2; a multicast reads once.
        l2_written: bytes of sectors written to L2.
        dram_read: bytes of sectors that L2 did not hold.
        dram_written: bytes of sectors written.
        waits: cycles that warps waited at barriers, by what for.
        intervals: of the timeline.
        ctas: of the timeline's CTAs, in the order of their start.
    """

    cycles: float
    seconds: float
    sms: int
    used_sms: int
    ctas_per_sm: int
    tensor_busy: float
    tensor_busy_steady: float
    issue_busy: float
    l2_read: int
    l2_written: int
    dram_read: int
    dram_written: int
    waits: dict[str, float]
    intervals: list[Interval] = field(repr=False)
    ctas: list[CtaPlace] = field(repr=False)


@dataclass(frozen=True)
class Costs:
    """What a launch cost.

    Attributes:
        counts: by group and name. "instructions", "lane_instructions" (by class) and "opcodes" of
            warps; "global": instructions, bytes that lanes asked for and sectors of 32 bytes, of
            loads, stores and atomics; "shared": likewise, with wavefronts and those of them that
            bank conflicts add; "bulk" and "tensor_memory": bytes of asynchronous copies;
            "mma_instructions" and "mma_flop" by kind (a multiply-add is two).
        timing: of the cycle model, where it ran.
    """

    counts: dict[str, dict[str, int]]
    timing: Timing | None = None

    def as_dict(self) -> dict[str, Any]:
        """Counts and times for JSON; the timeline is not in it."""
        result: dict[str, Any] = dict(self.counts)
        if self.timing is not None:
            # What is modelled is called so.
            result["modelled"] = dataclasses.asdict(
                dataclasses.replace(self.timing, intervals=[], ctas=[])
            )
            for name in ("intervals", "ctas"):
                del result["modelled"][name]
        return result

    def save_trace(self, path: str | Path) -> None:
        """Writes the timeline in Chrome's trace format (chrome://tracing, ui.perfetto.dev).

        A CTA is a process, a warp or an engine a thread of it; a cycle is shown as a microsecond.

        Args:
            path: of the JSON file.

        Raises:
            ValueError: if the launch kept no timeline.
        """
        if self.timing is None or not self.timing.ctas or not self.timing.intervals:
            raise ValueError("the launch kept no timeline: use CostModel(time=True, timeline=True)")
        events = _trace_events(self.timing)
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def costs_of(counts: dict[str, dict[str, int]], timing: dict[str, Any] | None) -> Costs | None:
    """Of what the extension reports."""
    if timing is not None:
        intervals = [Interval(*i) for i in timing.pop("intervals")]
        ctas = [CtaPlace(*c) for c in timing.pop("ctas")]
        return Costs(counts, Timing(**timing, intervals=intervals, ctas=ctas))
    return Costs(counts) if counts else None


def _trace_events(timing: Timing) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    tracks: dict[tuple[int, str, int], int] = {}

    def thread(cta: int, name: str, row: int = 0) -> int:
        key = (cta, name, row)
        if key not in tracks:
            tracks[key] = len(tracks) + 1
            events.append(_name("thread_name", cta, tracks[key], f"{name} {row}" if row else name))
        return tracks[key]

    for number, cta in enumerate(timing.ctas):
        label = f"CTA ({cta.x},{cta.y},{cta.z}) on SM {cta.sm}"
        events.append(_name("process_name", number, 0, label))
    # Copies overlap: each goes to the first row of its engine that is free.
    rows: dict[tuple[int, str], list[tuple[float, int]]] = {}
    for i in sorted(timing.intervals, key=lambda i: (i.begin, -i.end)):
        if i.track in ("warp", "wait"):
            track = thread(i.cta, f"warp {i.warp}")
        else:
            free = rows.setdefault((i.cta, i.track), [])
            row = heapq.heappop(free)[1] if free and free[0][0] <= i.begin else len(free)
            heapq.heappush(free, (i.end, row))
            track = thread(i.cta, i.track, row)
        events.append(
            {
                "ph": "X", "pid": i.cta, "tid": track, "ts": i.begin, "dur": i.end - i.begin,
                "name": f"waits for {i.name}" if i.track == "wait" else i.name,
                "args": {"line": i.line, "warp": i.warp},
            }
        )  # fmt: skip
    return events


def _name(kind: str, cta: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": cta, "tid": track, "args": {"name": name}}
