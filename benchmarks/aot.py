"""Compile decoding and training for TPUs (and a GPU) that need not be there, and check what they move.

    python benchmarks/aot.py [--only NAME ...] [--json FILE] [--save DIR]

Llama-2-7B shapes, bfloat16, S = 2048; training steps of 32 rows of 2048 tokens over 16 chips. HBM bytes
and collectives are counted from the compiled program (hlo.py); milliseconds are bytes over peak bandwidth,
a lower bound and no measurement. Exit status 1 when a limit is passed, 2 when the TPU compiler is not
installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import hlo
import jax
from aot_cases import AROUND_RATIO, BANDWIDTH, Built, Case, Limits, cases
from rich.console import Console
from rich.table import Table


@dataclasses.dataclass
class Row:
    """One line of the report; bytes of one device."""

    name: str
    read: float
    write: float
    read_dearest: float  # with the dearest branch of every conditional: sampling with all filters
    minimum: float
    arguments: float
    temp: float
    memory: float  # arguments, results and temporaries, what is reused once
    alias: float
    donated: float
    collectives: dict[str, tuple[int, float]]
    times_plain: float | None
    bound_ms: float
    limits: Limits
    passed: dict[str, str]  # the limits that were passed: which, and by what


def measure(name: str, case: Case, save: Path | None) -> list[Row]:
    """Compile a case and hold it against its limits. A loop of unknown length is reported by itself."""
    made = case.build()
    text = made.program.as_text()
    if save:
        (save / f"{name}.hlo.txt").write_text(text)
    memory = made.program.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    held = memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
    module = hlo.parse(text)
    traffic, dearest = hlo.count(module), hlo.count(module, dearest=True)
    plain = hlo.count(hlo.parse(case.plain().program.as_text())).total if case.plain else None
    loops = [loop.body for loop in traffic.loops if loop.trips is None]
    dearest_loops = [loop.body for loop in dearest.loops if loop.trips is None]
    per_step, per_step_dearest = (loops[0], dearest_loops[0]) if loops else (traffic, dearest)

    def row(label: str, part: hlo.Traffic, read_dearest: float, limits: Limits) -> Row:
        return Row(
            name=label,
            read=part.read,
            write=part.write,
            read_dearest=read_dearest,
            minimum=made.minimum,
            arguments=memory.argument_size_in_bytes,
            temp=memory.temp_size_in_bytes,
            memory=held,
            alias=memory.alias_size_in_bytes,
            donated=made.donated,
            collectives=part.collectives,
            times_plain=part.total / plain if plain and part is per_step else None,
            bound_ms=1e3 * part.total / BANDWIDTH[case.chip],
            limits=limits,
            passed=violations(part, made, memory.temp_size_in_bytes, held, plain, limits),
        )

    rows = [row(name, per_step, per_step_dearest.read, case.limits)]
    if case.limits != Limits() and not case.breaks:
        buffers = hlo.aliased(text)
        if memory.alias_size_in_bytes < made.donated or buffers != made.leaves:
            rows[0].passed["alias"] = f"{buffers} of {made.leaves} donated buffers are reused"
    if loops:
        outside = hlo.Traffic(traffic.read - per_step.read, traffic.write - per_step.write)
        for kind, (number, size) in traffic.collectives.items():
            inside = per_step.collectives.get(kind, (0, 0.0))
            if number > inside[0]:
                outside.collective(kind, number - inside[0], size - inside[1])
        rows.append(row(f"{name}, around", outside, dearest.read - per_step_dearest.read, Limits()))
        if outside.total > AROUND_RATIO * made.minimum:
            moved = f"{outside.total / 1e9:.3f} GB moved outside of the loop"
            rows[1].passed["around"] = f"{moved}, limit {AROUND_RATIO * made.minimum / 1e9:.3f}"
    for line in rows:
        if line.passed and not case.breaks:
            writers = sorted(traffic.rows, key=lambda moved: -moved[1])[:5]
            line.passed["largest writes"] = "; ".join(f"{w / 1e6:.1f} MB {what}" for _, w, what in writers)
    return rows


def violations(
    part: hlo.Traffic, made: Built, temp: float, held: float, plain: float | None, limits: Limits
) -> dict[str, str]:
    """The limits that are passed: which, and by what.

    temp, held: bytes of temporaries, and of everything. plain: bytes of the plain step, if there is one.
    """
    found = {}
    if limits.read_ratio and part.read > limits.read_ratio * made.minimum:
        found["read"] = f"{part.read / made.minimum:.4f} times the minimum is read, limit {limits.read_ratio}"
    if limits.write_ratio and part.write > limits.write_ratio * made.donated:
        times = f"{part.write / made.donated:.4f} times the cache"
        found["write"] = f"{times} is written, limit {limits.write_ratio}"
    if limits.times_plain and plain and part.total > limits.times_plain * plain:
        times = f"{part.total / plain:.4f} times a plain step's bytes are moved"
        found["times plain"] = f"{times}, limit {limits.times_plain}"
    if limits.temp and temp > limits.temp:
        found["temp"] = f"{temp / 1e6:.1f} MB of temporaries, limit {limits.temp / 1e6:.1f}"
    if limits.memory and held > limits.memory:
        found["memory"] = f"{held / 1e9:.2f} GB in all, limit {limits.memory / 1e9:.2f}"
    for kind, (number, size) in part.collectives.items():
        most = 0 if limits.collectives is None else limits.collectives.get(kind, 0)
        if limits.collectives is not None and not kind.endswith("(tiny)") and number > most:
            found[kind] = f"{number} {kind} of {size / 1e6:.2f} MB together, limit {most}"
    return found


def table(rows: list[Row]) -> Table:
    """The report, limits beside the figures that have one."""
    head = (
        "program",
        "read GB",
        "dearest",
        "write GB",
        "minimum",
        "ratio",
        "times plain",
        "temp MB",
        "memory GB",
        "alias MB",
    )
    made = Table(*head, "collectives", "bound ms", title="One device: HBM bytes of a step or call")

    def limit(value: str, most: str | None) -> str:
        return f"{value} ≤ {most}" if most else value

    for row in rows:
        stated = row.minimum > 0 and not row.name.endswith("around")
        kinds = ", ".join(f"{n} {k} {size / 1e6:.2f} MB" for k, (n, size) in sorted(row.collectives.items()))
        expected = row.limits.collectives
        counts = None if expected is None else " ".join(f"{n} {k}" for k, n in expected.items()) or "0"
        made.add_row(
            row.name,
            f"{row.read / 1e9:.4f}",
            f"{row.read_dearest / 1e9:.4f}",
            limit(
                f"{row.write / 1e9:.4f}",
                f"{row.limits.write_ratio * row.donated / 1e9:.4f}" if row.limits.write_ratio else None,
            ),
            f"{row.minimum / 1e9:.4f}" if stated else "",
            limit(f"{row.read / row.minimum:.4f}", str(row.limits.read_ratio or "")) if stated else "",
            limit(f"{row.times_plain:.3f}", str(row.limits.times_plain or "")) if row.times_plain else "",
            limit(f"{row.temp / 1e6:.1f}", f"{row.limits.temp / 1e6:.0f}" if row.limits.temp else None),
            limit(f"{row.memory / 1e9:.2f}", f"{row.limits.memory / 1e9:.2f}" if row.limits.memory else None),
            f"{row.alias / 1e6:.1f} of {row.donated / 1e6:.1f}",
            limit(kinds or "none", counts),
            f"{row.bound_ms:.3f}",
        )
    return made


def main(arguments: list[str] | None = None) -> int:
    """Compile, print the table, and return the exit status."""
    known = cases()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", action="append", choices=known, metavar="NAME", help=", ".join(known))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, in bytes")
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep the compiled programs' text")
    options = parser.parse_args(arguments)
    names = options.only or list(known)
    if importlib.util.find_spec("libtpu") is None:
        print("aot: the TPU compiler is missing: pip install 'medusa-jax[tpu]'", file=sys.stderr)
        return 2
    if options.save:
        options.save.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    failures = []
    for name in names:
        case = known[name]
        if case.chip == "h200" and importlib.util.find_spec("jax_plugins.xla_cuda12") is None:
            print(f"{name}: left out, the CUDA compiler is missing (medusa-jax[cuda12])", file=sys.stderr)
            continue
        print(f"{name}: compiling", file=sys.stderr, flush=True)
        try:
            found = measure(name, case, options.save)
        except jax.errors.JaxRuntimeError as error:  # running out of device memory among others
            failures.append(f"{name}: does not compile: {str(error).splitlines()[0]}")
            continue
        rows += found
        if case.breaks:
            unseen = case.breaks - found[0].passed.keys()
            failures += [f"{name}: the counter misses what this control does: {kind}" for kind in unseen]
        else:
            failures += [f"{row.name}: {kind}: {what}" for row in found for kind, what in row.passed.items()]
    console = Console() if sys.stdout.isatty() else Console(width=210)
    console.print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
