"""HBM bytes and collectives of one run of a compiled program, counted from its optimised HLO text.

`Compiled.cost_analysis()` counts the body of a loop once and on-chip traffic as "bytes accessed"; this
counter multiplies by trip counts and leaves out what stays on the chip. Its rules:

* An instruction reads its operands and writes its results. Arrays in a memory space other than 0 are on
  the chip (TPU: `S(1)`) and cost nothing. Bytes are those of the shape, without the padding of tiles.
* A slice or gather reads only what it returns. A fusion that only slices a parameter reads only the slices.
* `dynamic-update-slice` on a buffer of its own program or fusion parameter works in place: it reads and
  writes the update. A `scatter` is counted as a rewrite of the whole array, as TPUs do it.
* `copy-start`, `slice-start` and other asynchronous pairs count at their start.
* Of a conditional one branch is counted, the cheapest unless asked otherwise; of each kind of collective
  as many as the branch that has most of them, so that a limit holds whichever branch is taken.
* A `while` counts its body times its trip count, from `known_trip_count` or from a condition `i < constant`
  with a constant start. Loops whose end is only known at run time count `unknown_trips` times.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{\s*$")

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_GOES_ON = "async_collective_fusion"  # what XLA:TPU calls such computations
TINY = 4096  # bytes: up to it a collective's price is its latency

# No traffic of their own: names for buffers that exist, or bookkeeping.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "optimization-barrier", "add-dependency", "domain",
}  # fmt: skip
_FREE_CUSTOM_CALLS = ("ConcatBitcast", "AllocateBuffer")
# Inside a fusion these are evaluated only where their result is used.
_LAZY = {"bitcast", "bitcast-convert", "reshape", "copy", "transpose", "convert", "get-tuple-element"}
_SLICES = ("slice", "dynamic-slice", "gather")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result."""

    elements: int
    bits: int  # of one element
    space: int  # 0: HBM

    @property
    def size(self) -> float:
        """Bytes, wherever it lies."""
        return self.elements * self.bits / 8

    @property
    def hbm(self) -> float:
        """Bytes in HBM."""
        return self.size if self.space == 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    type: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    inner: str  # the text between the operation's parentheses
    attributes: str
    root: bool

    def attribute(self, name: str) -> str | None:
        """The computation that attribute `name` refers to."""
        found = re.search(rf"\b{name}=%([^\s,}}]+)", self.attributes)
        return found.group(1) if found else None

    @property
    def index(self) -> int:
        """Of a parameter or get-tuple-element."""
        if self.opcode == "parameter":
            return int(self.inner)
        found = re.search(r"\bindex=(\d+)", self.attributes)
        return int(found.group(1)) if found else 0


Computation = dict[str, Instruction]


@dataclasses.dataclass
class Module:
    """The computations of a program."""

    computations: dict[str, Computation]
    entry: str


@dataclasses.dataclass
class Traffic:
    """Bytes read from and written to HBM, and collectives by kind, of one run on one device."""

    read: float = 0.0
    write: float = 0.0
    # kind, " (tiny)" behind those of at most TINY -> number, bytes (of operands or results, the larger)
    collectives: dict[str, tuple[int, float]] = dataclasses.field(default_factory=dict)
    rows: list[tuple[float, float, str]] = dataclasses.field(default_factory=list)  # read, write, what
    loops: list[Loop] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> float:
        """Bytes read and written."""
        return self.read + self.write

    def add(self, other: Traffic, times: int = 1) -> None:
        """Add `times` runs of `other`; its loops are listed once."""
        self.read += times * other.read
        self.write += times * other.write
        for kind, (number, size) in other.collectives.items():
            self.collective(kind, times * number, times * size)
        self.rows += [(times * read, times * write, what) for read, write, what in other.rows]
        self.loops += other.loops

    def collective(self, kind: str, number: int, size: float) -> None:
        """Count `number` collectives of `size` bytes together."""
        before = self.collectives.get(kind, (0, 0.0))
        self.collectives[kind] = (before[0] + number, before[1] + size)

    def largest(self, count: int) -> list[tuple[float, float, str]]:
        """The instructions that move most: read, write, what."""
        return sorted(self.rows, key=lambda row: -row[0] - row[1])[:count]


@dataclasses.dataclass
class Loop:
    """A while loop that was met: its trips (None: known only at run time) and what one trip moves."""

    name: str
    trips: int | None
    body: Traffic


def _arrays(text: str) -> tuple[Array, ...]:
    found = []
    for dtype, dims, layout in _SHAPE.findall(text):
        bits = _BITS.get(dtype)
        if bits is None:
            digits = re.search(r"\d+", dtype)
            if digits is None:
                raise ValueError(f"hlo: unknown element type {dtype!r}")
            bits = int(digits.group())  # s4, bf16, u32, f8e4m3fn
        elements = 1
        for size in filter(None, dims.split(",")):
            elements *= int(size)
        space = re.search(r"S\((\d+)\)", layout)
        found.append(Array(elements, bits, int(space.group(1)) if space else 0))
    return tuple(found)


def _closing(text: str, start: int) -> int:
    """The index behind the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"hlo: unbalanced parentheses in {text[:80]!r}")


def _instruction(name: str, body: str, root: bool) -> Instruction:
    end = _closing(body, 0) if body.startswith("(") else body.index(" ")
    call = body[end:].lstrip()
    opening = call.index("(")
    closing = _closing(call, opening)
    kind, inner, attributes = body[:end], call[opening + 1 : closing - 1], call[closing:]
    operands = tuple(re.findall(r"%([^\s,()]+)", inner))
    return Instruction(name, call[:opening], kind, _arrays(kind), operands, inner, attributes, root)


def parse(text: str) -> Module:
    """Read what `Compiled.as_text()` returns. Raises ValueError for text that is no HLO module."""
    computations: dict[str, Computation] = {}
    current: Computation | None = None
    entry = None
    for line in text.splitlines():
        if current is None:
            header = _COMPUTATION.match(line)
            if header:
                current = computations[header.group(2)] = {}
                entry = header.group(2) if header.group(1) else entry
        elif line.startswith("}"):
            current = None
        else:
            found = _INSTRUCTION.match(line)
            if found:
                root, name, body = found.groups()
                current[name] = _instruction(name, body, bool(root))
    if entry is None:
        raise ValueError("hlo: no ENTRY computation in the text")
    return Module(computations, entry)


def aliased(text: str) -> int:
    """The number of results that reuse the buffer of a donated argument."""
    return len(re.findall(r"(?:may|must)-alias\)", text.split("\n", 1)[0]))


def count(module: Module, *, unknown_trips: int = 1, dearest: bool = False) -> Traffic:
    """Traffic of one run. Of conditionals the cheapest branch counts, or with `dearest` the dearest."""
    return _Counter(module, unknown_trips, dearest).computation(module.entry)


class _Counter:
    def __init__(self, module: Module, unknown_trips: int, dearest: bool) -> None:
        self.computations = module.computations
        self.unknown_trips = unknown_trips
        self.dearest = dearest
        self.users: dict[str, dict[str, list[Instruction]]] = {}

    def computation(self, name: str) -> Traffic:
        """Traffic of one run of a computation that is executed instruction by instruction."""
        total = Traffic()
        for instruction in self.computations[name].values():
            self.instruction(name, instruction, total)
        return total

    def instruction(self, where: str, x: Instruction, total: Traffic) -> None:
        """Add an instruction of computation `where` to `total`."""
        if x.opcode == "while":
            trips = self.trips(where, x)
            body = self.computation(self.called(x, "body"))
            total.loops.append(Loop(x.name, trips, body))
            total.add(body, self.unknown_trips if trips is None else trips)
        elif x.opcode == "conditional":
            listed = re.search(r"branch_computations=\{([^}]*)\}", x.attributes)
            names = re.findall(r"%([^\s,]+)", listed.group(1)) if listed else None
            names = names or [self.called(x, "true_computation"), self.called(x, "false_computation")]
            branches = [self.computation(name) for name in names]
            taken = (max if self.dearest else min)(branches, key=lambda branch: branch.total)
            most: dict[str, tuple[int, float]] = {}
            for branch in branches:
                for kind, moved in branch.collectives.items():
                    most[kind] = max(most.get(kind, moved), moved)
            total.add(dataclasses.replace(taken, collectives=most))
        elif x.opcode == "call":
            total.add(self.computation(self.called(x, "to_apply")))
        elif x.opcode not in _FREE and not x.opcode.endswith(("-done", "-update")):
            read, write = self.bytes(where, x)
            if read or write:
                total.read += read
                total.write += write
                label = re.search(r'op_name="([^"]*)"', x.attributes)
                total.rows.append((read, write, f"{x.opcode} {x.name} {label.group(1) if label else ''}"))
            for kind, size in self.collectives(where, x):
                total.collective(kind if size > TINY else f"{kind} (tiny)", 1, size)

    def called(self, x: Instruction, attribute: str) -> str:
        name = x.attribute(attribute)
        if name not in self.computations:
            raise ValueError(f"hlo: {x.opcode} {x.name} names no computation as its {attribute}")
        return name

    def operand_arrays(self, where: str, x: Instruction) -> list[tuple[Array, ...]]:
        return [self.computations[where][name].arrays for name in x.operands]

    def bytes(self, where: str, x: Instruction) -> tuple[float, float]:
        """HBM bytes (read, written) of an instruction that calls no computation but a fusion's."""
        operands = self.operand_arrays(where, x)
        results, opcode = x.arrays, x.opcode
        if opcode.endswith("-start"):
            opcode = opcode.removesuffix("-start")
            results = self.started(opcode, x, operands)
        if opcode == "custom-call" and any(name in x.attributes for name in _FREE_CUSTOM_CALLS):
            return 0.0, 0.0
        read = sum(array.hbm for arrays in operands for array in arrays)
        write = sum(array.hbm for array in results)
        calls = x.attribute("calls")
        if calls in self.computations:
            used = [
                self.used(calls, i) * arrays[0].bits / 8 if len(arrays) == 1 else arrays_hbm(arrays)
                for i, arrays in enumerate(operands)
            ]
            read = sum(min(arrays_hbm(arrays), size) for arrays, size in zip(operands, used, strict=True))
            write = sum(
                min(array.hbm, size)
                for array, size in zip(results, self.written(calls, results), strict=True)
            )
        elif opcode in _SLICES:
            returned = sum(array.size for array in results)
            others = sum(arrays_hbm(arrays) for arrays in operands[1:])
            read = min(arrays_hbm(operands[0]), returned) + others
        elif opcode == "dynamic-update-slice":
            update = sum(array.size for array in operands[1])
            read = sum(arrays_hbm(arrays) for arrays in operands[1:])
            write = min(write, update)
        return read, write

    def started(self, opcode: str, x: Instruction, operands: list[tuple[Array, ...]]) -> tuple[Array, ...]:
        """The results proper among the arrays of an asynchronous start, which also lists operands."""
        if opcode == "all-reduce":
            return x.arrays
        if opcode == "copy":  # (destination, source, context)
            return x.arrays[:1]
        before = sum(map(len, operands))  # ((operands), results, contexts)
        return (
            tuple(array for array in x.arrays[before:] if array.elements > 1) or x.arrays[before : before + 1]
        )

    # ------------------------------------------------------------------------------------- fusions

    def users_of(self, where: str, name: str) -> list[Instruction]:
        if where not in self.users:
            table = self.users[where] = defaultdict(list)
            for x in self.computations[where].values():
                for operand in dict.fromkeys(x.operands):
                    table[operand].append(x)
        return self.users[where].get(name, [])

    def parameter(self, where: str, index: int) -> Instruction | None:
        for x in self.computations[where].values():
            if x.opcode == "parameter" and x.index == index:
                return x
        return None

    def used(self, fusion: str, index: int) -> float:
        """Elements of parameter `index` that a fused computation reads."""
        parameter = self.parameter(fusion, index)
        if parameter is None:
            return 0.0
        return self.used_from((fusion,), (), parameter)

    def used_from(self, path: tuple[str, ...], callers: tuple[Instruction, ...], x: Instruction) -> float:
        """Elements of x's value that are read behind it; `path`: computations, each fused into the last."""
        full = float(x.arrays[0].elements) if x.arrays else 0.0
        if x.root:
            if not callers:
                return full
            return self.used_from(path[:-1], callers[:-1], callers[-1])
        total = 0.0
        for user in self.users_of(path[-1], x.name):
            first = user.operands[0] == x.name
            if user.opcode in _SLICES and first:
                total += user.arrays[0].elements
            elif user.opcode == "dynamic-update-slice" and first and self.in_place(path[-1], user):
                continue  # what is not overwritten is not touched
            elif user.opcode in _LAZY:
                total += self.used_from(path, callers, user)
            elif user.opcode == "fusion":
                inner = self.called(user, "calls")
                for i, operand in enumerate(user.operands):
                    parameter = self.parameter(inner, i) if operand == x.name else None
                    if parameter:
                        total += self.used_from((*path, inner), (*callers, user), parameter)
            else:
                return full
        return total

    def in_place(self, where: str, update: Instruction) -> bool:
        """Whether a fused dynamic-update-slice can share the buffer: a parameter in, the result out."""
        base = self.computations[where][update.operands[0]]
        while base.opcode == "bitcast":
            base = self.computations[where][base.operands[0]]
        result = update
        while not result.root:
            users = self.users_of(where, result.name)
            if len(users) != 1 or users[0].opcode not in ("bitcast", "tuple"):
                return False
            result = users[0]
        return base.opcode == "parameter"

    def written(self, fusion: str, results: tuple[Array, ...]) -> Iterator[float]:
        """Bytes that a fused computation writes for each of its results."""
        computation = self.computations[fusion]
        root = next(x for x in computation.values() if x.root)
        outputs = [computation[name] for name in root.operands] if root.opcode == "tuple" else [root]
        for array, output in zip(results, outputs, strict=False):
            yield self.output(fusion, output, array)
        yield from (array.size for array in results[len(outputs) :])

    def output(self, where: str, x: Instruction, array: Array) -> float:
        while x.opcode == "bitcast":
            x = self.computations[where][x.operands[0]]
        if x.opcode == "dynamic-update-slice" and self.in_place(where, x):
            return self.computations[where][x.operands[1]].arrays[0].size
        if x.opcode == "fusion" and len(x.arrays) == 1:
            return next(self.written(self.called(x, "calls"), x.arrays))
        return array.size

    # ----------------------------------------------------------------------- loops and collectives

    def trips(self, where: str, loop: Instruction) -> int | None:
        known = re.search(r"known_trip_count\W+n\W+(\d+)", loop.attributes)
        if known:
            return int(known.group(1))
        condition = self.computations[self.called(loop, "condition")]
        root = next(x for x in condition.values() if x.root)
        initial = self.computations[where][loop.operands[0]]
        if root.opcode != "compare" or "direction=LT" not in root.attributes or initial.opcode != "tuple":
            return None
        start, end = (self.constant(where, initial, condition, condition[name]) for name in root.operands)
        counter = condition[root.operands[0]]
        return None if start is None or end is None or counter.opcode == "constant" else end - start

    def constant(
        self, where: str, initial: Instruction, condition: Computation, x: Instruction
    ) -> int | None:
        """The value of x in a loop's condition before the first trip, when it is a literal."""
        if x.opcode == "get-tuple-element":
            x = self.computations[where][initial.operands[x.index]]
            while x.opcode in ("copy", "bitcast"):
                x = self.computations[where][x.operands[0]]
        return int(x.inner) if x.opcode == "constant" and x.inner.lstrip("-").isdigit() else None

    def collectives(self, where: str, x: Instruction) -> Iterator[tuple[str, float]]:
        """Kind and bytes of an instruction's collectives, also inside its fused or called computation."""
        kind = x.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            moved = sum(array.size for arrays in self.operand_arrays(where, x) for array in arrays)
            results = x.arrays
            if x.opcode.endswith("-start"):
                results = self.started(kind, x, self.operand_arrays(where, x))
            yield kind, max(moved, sum(array.size for array in results))
            return
        inner = x.attribute("calls") or x.attribute("called_computations")
        if inner in self.computations and not self.goes_on(inner):
            for y in self.computations[inner].values():
                yield from self.collectives(inner, y)

    def goes_on(self, inner: str) -> bool:
        """Whether a computation names a gather that has begun before: beside a product, or where it ends."""
        ends = any("AsyncCollectiveDone" in x.attributes for x in self.computations[inner].values())
        return ends or inner.startswith(_GOES_ON)


def arrays_hbm(arrays: tuple[Array, ...]) -> float:
    """Bytes of arrays in HBM."""
    return sum(array.hbm for array in arrays)
