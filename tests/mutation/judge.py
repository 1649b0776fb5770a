"""Runs a kernel and its mutants over seeds and says which of them were caught, and how."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from jax_fp4 import sim
from mutation.mutants import Mutant, mutants

# A mutant may run this much longer than the kernel before it counts as caught by a timeout.
_PATIENCE = 20


@dataclass(frozen=True)
class Case:
    """A kernel that is right, and how to tell.

    Attributes:
        name: of the kernel.
        sm: of the machine.
        ptx: the text.
        run: launches it on a machine that has loaded it, within a budget of warp instructions, and
            returns how many it executed; raises AssertionError if the result is wrong.
        checks: what the machine watches.
        clusters: of a grid that run at a time.
    """

    name: str
    sm: str
    ptx: str
    run: Callable[[sim.Machine, sim.Module, int], int]
    checks: sim.Checks = field(default_factory=sim.Checks)
    clusters: int = 4

    def machine(self, seed: int) -> sim.Machine:
        """One for its launches."""
        return sim.Machine(self.sm, seed=seed, checks=self.checks, clusters=self.clusters)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: "reported" by a check, "wrong", "refused" text, or "survived"."""

    mutant: Mutant
    outcome: str
    detail: str = ""


def _outcome(case: Case, ptx: str, seed: int, budget: int) -> tuple[str, str]:
    machine = case.machine(seed)
    try:
        module = machine.load(ptx)
    except sim.PtxError as error:
        return "refused", str(error).splitlines()[0]
    try:
        case.run(machine, module, budget)
    except sim.SimulationError as error:
        return "reported", f"{error.kind} at line {error.line}, seed {seed}"
    except AssertionError:
        return "wrong", f"seed {seed}"
    return "survived", ""


def longest_run(case: Case, seeds: Iterable[int]) -> int:
    """Runs the kernel itself, which must pass at every seed.

    Args:
        case: the kernel.
        seeds: of the schedules.

    Returns:
        Warp instructions of the longest run.
    """
    longest = 0
    for seed in seeds:
        machine = case.machine(seed)
        longest = max(longest, case.run(machine, machine.load(case.ptx), 1 << 30))
    return longest


def judge(case: Case, seeds: range) -> list[Verdict]:
    """Judges every mutant of a kernel.

    Args:
        case: the kernel.
        seeds: a mutant survives if it passes at all of them.

    Returns:
        One verdict for each mutant, in the order of the lines.
    """
    budget = _PATIENCE * longest_run(case, seeds)
    verdicts = []
    for mutant in mutants(case.ptx):
        outcome, detail = "survived", ""
        for seed in seeds:
            outcome, detail = _outcome(case, mutant.ptx, seed, budget)
            if outcome != "survived":
                break
        verdicts.append(Verdict(mutant, outcome, detail))
    return verdicts
