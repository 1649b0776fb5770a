"""Mutants of a kernel: one instruction that orders, counts or allocates removed or weakened.

A mutation is text to text, so that it needs no knowledge of the machine that judges it.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

# The first group is the guard. What is removed outright; a label before the instruction stays.
_GUARD = r"(@!?%?\w+\s+)?"
_REMOVED = {
    "fence": r"fence\.[\w.:]+",
    "tcgen05.wait": r"tcgen05\.wait::[\w.:]+",
    "tcgen05.fence": r"tcgen05\.fence::[\w.:]+",
    "tcgen05.commit": r"tcgen05\.commit\.[^;]*",
    "tcgen05.alloc": r"tcgen05\.(?:alloc|dealloc|relinquish_alloc_permit)\b[^;]*",
    "barrier": r"(?:bar|barrier)(?:\.cta)?\.(?:sync|arrive)\b[^;]*",
    "barrier.cluster": r"barrier\.cluster\.(?:arrive|wait)\b[^;]*",
    "bulk group": r"cp\.async\.bulk\.(?:commit_group|wait_group)\b[^;]*",
    "cp.async group": r"cp\.async\.(?:commit_group|wait_group|wait_all)\b[^;]*",
    "mbarrier.arrive": r"mbarrier\.arrive\b[^;]*",
    "mbarrier.expect_tx": r"mbarrier\.expect_tx\b[^;]*",
    "mbarrier.init": r"mbarrier\.(?:init|inval)\b[^;]*",
    "griddepcontrol": r"griddepcontrol\.(?:wait|launch_dependents)",
    "warp barrier": r"bar\.warp\.sync\b[^;]*",
}
_REMOVED_PATTERNS = {
    kind: re.compile(r"(?<![\w.])" + _GUARD + body + r"\s*;") for kind, body in _REMOVED.items()
}


@dataclass(frozen=True)
class Mutant:
    """One change of a kernel.

    Attributes:
        kind: what was done, such as "remove fence" or "weaken wait".
        line: of the PTX text.
        instruction: as it was.
        ptx: the whole changed text; it has as many lines as before.
        number: among the mutants with its key, in the order of the lines, from 1 on.
    """

    kind: str
    line: int
    instruction: str
    ptx: str
    number: int = 0

    @property
    def key(self) -> str:
        """What stays the same when lines move: kind and instruction without register names."""
        return f"{self.kind}: {re.sub(r'%[a-z]+[0-9]+', '%', self.instruction)}"


def _weaken(instruction: str) -> Iterator[tuple[str, str]]:
    """Weaker forms of one instruction without its guard: (what was done, new text)."""
    wait = re.match(r"mbarrier\.(?:try|test)_wait\b\S*\s+(%?\w+)\s*,", instruction)
    if wait:
        yield "skip wait", f"setp.eq.u32 {wait[1]}, 0, 0;"
    expect = re.match(r"mbarrier\.arrive\.expect_tx(\S*)\s+(\S+?)\s*,\s*(\[[^]]*\])", instruction)
    if expect:
        yield "drop expect_tx", f"mbarrier.arrive{expect[1]} {expect[2]}, {expect[3]};"
    group = re.match(r"(cp\.async\.(?:bulk\.)?wait_group\S*)\s+(\d+)\s*;", instruction)
    if group:
        yield "wait for one group less", f"{group[1]} {int(group[2]) + 1};"
    if re.match(r"barrier\.cluster\.arrive\.(?:release|aligned)", instruction):
        relaxed = instruction.replace(".release", "")
        yield "relax arrive", relaxed.replace("arrive", "arrive.relaxed", 1)


def mutants(ptx: str) -> Iterator[Mutant]:
    """All mutants of a module, in the order of its lines.

    Args:
        ptx: the text; comments are left alone.

    Yields:
        Mutants whose text differs in one instruction.
    """
    code = re.sub(r"//[^\n]*", lambda m: " " * len(m[0]), ptx)

    def changed(match: re.Match[str], kind: str, new: str) -> Mutant:
        text = ptx[: match.start()] + new + ptx[match.end() :]
        line = ptx.count("\n", 0, match.start()) + 1
        return Mutant(kind, line, " ".join(match[0].split()), text)

    found = []
    for kind, pattern in _REMOVED_PATTERNS.items():
        found += [changed(m, f"remove {kind}", "") for m in pattern.finditer(code)]
    for match in re.finditer(
        r"(?<![\w.])" + _GUARD + r"((?:mbarrier|cp\.async|barrier\.cluster)\.[^;]*;)", code
    ):
        for kind, new in _weaken(match[2]):
            found.append(changed(match, kind, (match[1] or "") + new))
    seen = Counter[str]()
    for mutant in sorted(found, key=lambda m: (m.line, m.kind)):
        seen[mutant.key] += 1
        yield replace(mutant, number=seen[mutant.key])
