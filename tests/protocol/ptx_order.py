"""Which order does PTX guarantee? Questions about all paths of the control flow, loops included.

Each check raises `Misordered` with the two instructions and what is missing between them. Triton
3.6 and 3.7 spell what is matched here; if a new version spells it differently, the checks find
nothing and say so.
"""

from __future__ import annotations

import copy
import operator
import re
from collections import defaultdict
from collections.abc import Callable
from functools import cache

import pytest

BARRIER = r"bar\.sync|barrier(\.cta)?\.sync"
RELEASE = r"(atom|red|st)\.(global\.sys\.release|global\.release\.sys|release\.sys)"
ACQUIRE = r"(atom|ld)\.(global\.sys\.acquire|global\.acquire\.sys|acquire\.sys)"
COUNT = r"atom\.(global\.gpu\.acq_rel|acq_rel\.gpu)"
RELEASE_GPU = r"(atom|red)\.(global\.gpu\.release|release\.gpu)"
ACQUIRE_GPU = r"(atom|ld)\.(global\.gpu\.acquire|acquire\.gpu)"
TMA_STORE = r"cp\.async\.bulk\.tensor\.\dd\.global"
TMA_LOAD = r"cp\.async\.bulk\.tensor\.\dd\.shared"
TMA_COMPLETE = r"cp\.async\.bulk\.wait_group\s+0"  # with .read only shared memory has been read
PROXY_FENCE = r"fence\.proxy\.async(\.global)?$"  # of .shared::cta says nothing about global memory
STORE = r"st\.global(?!\.sys|\.release)"
LOAD = rf"ld\.global(?!\.sys|\.acquire|\.gpu\.acquire)|cp\.async\.c[ag]|{TMA_LOAD}"
CLOCK = r"%globaltimer"
BRANCH = r"^@!?%p\d+\s+bra"
RECORD = r"atom\.(global\.gpu\.relaxed|relaxed\.gpu)"  # counts the records of waits
LOOK = r"ld\.global\.sys\.relaxed"  # at the status record


class Misordered(AssertionError):
    """The PTX allows an order that breaks the protocol."""


class Ptx:
    """The instructions of a kernel and who may follow whom."""

    def __init__(self, text: str) -> None:
        body = re.sub(r"//.*", "", text[text.index(".entry") :])
        self._head = body[: body.index("{")]
        body = body[body.index("{") + 1 :]
        table = r"([$\w]+):\s*\.branchtargets([^;]*);"
        self._tables = {name: re.findall(r"[$\w]+", rows) for name, rows in re.findall(table, body)}
        body = re.sub(table, "", body)
        self.instructions: list[str] = []
        labels = defaultdict(list)
        for piece in re.split(r"[;\n]", body):
            statement = piece.strip(" \t{}")
            label = re.match(r"([$\w]+):\s*(.*)", statement)
            if label:
                labels[label[1]].append(len(self.instructions))
                statement = label[2]
            if statement and not statement.startswith("."):
                self.instructions.append(statement)
        self._labels = labels
        self._part = set(range(len(self.instructions)))
        self._next = [self._successors(i) for i in range(len(self.instructions))]

    def _successors(self, i: int) -> list[int]:
        predicate, operation = re.match(r"(@!?\S+\s+)?(.*)", self.instructions[i]).groups()
        following = [i + 1] if i + 1 < len(self.instructions) else []
        branch = re.match(r"bra(?:\.uni)?\s+(\S+)", operation)
        if branch:
            places = self._labels[branch[1]]
            # inline assembly repeats the names of its local labels, before and behind a branch
            target = min(places, key=lambda place: abs(place - i))
            return [target, *following] if predicate else [target]
        if table := re.match(r"brx\.idx(?:\.uni)?\s+\S+,\s*(\S+)", operation):
            return [self._labels[label][0] for label in self._tables[table[1]]]
        if re.match(r"(ret|exit)\b", operation) and not predicate:
            return []
        return following

    def find(self, pattern: str) -> list[int]:
        return [i for i in sorted(self._part) if re.search(pattern, self.instructions[i])]

    def partitions(self) -> list[tuple[Ptx, int]]:
        """The code of each partition of a warp-specialised kernel, and its number of warps: first
        that of the workers, in their order, and last that of the warps that `num_warps` counts.
        """
        (dispatch,) = self.find(r"^ld\.shared\.[bu]8")  # a worker reads its byte
        (threads,) = (int(n) for n in re.findall(r"\.reqntid (\d+)", self._head))
        # one byte a worker warp, written before the workers set out: the number of its partition
        start = self.find(r"^barrier\.sync")[0]
        pattern = r"st\.shared\.(?:v\d\.)?b32\s+\[global_smem\+\d+\], \{?([\d, ]+)"
        stores = (re.match(pattern, text) for text in self.instructions[:start])
        words = [int(word) for store in stores if store for word in store[1].split(",")]
        of_warp = b"".join(word.to_bytes(4, "little") for word in words)
        parts = [
            (self._reachable(self._sent_to(dispatch, number), dispatch), of_warp.count(number))
            for number in sorted({*of_warp})
        ]
        return [*parts, (self._reachable(0, dispatch), threads // 32 - len(of_warp))]

    def _sent_to(self, load: int, number: int) -> int:
        """Where a worker goes that has loaded `number`: by a table, or by comparisons."""
        values = {self.instructions[load].split()[1].rstrip(","): number}
        i = load + 1
        while True:
            text = self.instructions[i]
            if made := re.match(r"add\.s(\d+)\s+(\S+), (\S+), (-?\d+)$", text):
                values[made[2]] = (values[made[3]] + int(made[4])) % 2 ** int(made[1])
            elif asked := re.match(r"setp\.(eq|ne|lt|gt)\.[bu]\d+\s+(\S+), (\S+), (\d+)$", text):
                values[asked[2]] = getattr(operator, asked[1])(values[asked[3]], int(asked[4]))
            elif branch := re.match(r"(?:@(\S+)\s+)?bra\S*\s+(\S+)$", text):
                if values.get(branch[1], True):
                    (i,) = self._labels[branch[2]]
                    continue
            elif table := re.match(r"brx\.idx(?:\.uni)?\s+(\S+),\s*(\S+)", text):
                return self._labels[self._tables[table[2]][values[table[1]]]][0]
            else:
                return i
            i += 1

    def _reachable(self, first: int, stop: int) -> Ptx:
        part = copy.copy(self)
        part._part, front = set(), [first]
        while front:
            i = front.pop()
            if i != stop and i not in part._part:
                part._part.add(i)
                front += self._next[i]
        return part

    def is_memory(self, i: int) -> bool:
        return bool(re.match(r"(@\S+\s+)?(ld|st|atom|red)\b", self.instructions[i]))

    def reach(self, start: int, goals: set[int], without: set[int]) -> int | None:
        """A goal that some path from `start` reaches without passing `without`."""
        seen, front = set(), list(self._next[start])
        while front:
            i = front.pop()
            if i in seen or i in without or i not in self._part:
                continue
            if i in goals:
                return i
            seen.add(i)
            front += self._next[i]
        return None

    def require(self, first: str, then: str, between: str, meaning: str) -> None:
        """On every path from a `first` to a `then` lies a `between`."""
        goals, without = set(self.find(then)), set(self.find(between))
        for start in self.find(first):
            end = self.reach(start, goals, without)
            if end is not None:
                raise Misordered(
                    f"{meaning}: {self.instructions[start]!r} reaches {self.instructions[end]!r}"
                )

    def require_some(self, pattern: str, meaning: str) -> None:
        if not self.find(pattern):
            raise Misordered(f"{meaning}: no {pattern}")


def parsed(text: str) -> Ptx:
    """A Ptx of its own, of text that many tests ask about."""
    ptx = copy.copy(_parsed_once(text))
    ptx.instructions = [*ptx.instructions]  # a check may replace some
    return ptx


@cache
def _parsed_once(text: str) -> Ptx:
    return Ptx(text)


def without_records(ptx: Ptx) -> Ptx:
    """The same without the records of late waits and refusals: one thread looks whether there is
    one, and writes its words and its mark, which the host reads.
    """
    looks, releases = ptx.find(LOOK), ptx.find(RELEASE)
    records = [
        (look, mark) for look in looks for mark in releases
        if _address(ptx, look) == _address(ptx, mark)
        and ptx.reach(look, {mark}, {*looks, *releases} - {mark})
    ]  # fmt: skip
    assert bool(looks and releases) == bool(records), "a late wait leaves no record"
    for look, mark in records:
        ptx.instructions[look : mark + 1] = ["record"] * (mark + 1 - look)
    return ptx


def _address(ptx: Ptx, i: int) -> str:
    return re.search(r"\[(.*)\]", ptx.instructions[i])[1]


def check_release(ptx: Ptx, barrier: str = BARRIER) -> None:
    """What all threads have stored is visible to whoever sees the signal."""
    ptx.require_some(RELEASE, "no signal is released to the system")
    ptx.require_some(f"{STORE}|{TMA_STORE}", "nothing is stored")
    announced = f"{RELEASE}|{COUNT}"
    ptx.require(STORE, announced, barrier, "only one thread's stores are ordered: no CTA barrier")
    ptx.require(TMA_STORE, announced, TMA_COMPLETE, "a TMA store is read, but not complete")
    ptx.require(TMA_COMPLETE, announced, PROXY_FENCE, "a TMA store is not fenced")
    ptx.require(PROXY_FENCE, announced, barrier, "not all threads have fenced: no CTA barrier")


def check_count(ptx: Ptx, barrier: str = BARRIER) -> None:
    """Programs join at a counter before the last one signals."""
    ptx.require_some(COUNT, "arrivals are not counted with acquire and release")
    ptx.require(f"{STORE}|{TMA_STORE}", RELEASE, COUNT, "a signal is raised without counting")
    ptx.require(COUNT, RELEASE, barrier, "no CTA barrier between the count and the signal")


def check_acquire(ptx: Ptx, barrier: str = BARRIER) -> None:
    """Loads of all threads come after the signal that one thread has seen."""
    ptx.require_some(ACQUIRE, "no signal is acquired from the system")
    ptx.require_some(LOAD, "nothing is loaded")
    ptx.require(ACQUIRE, LOAD, barrier, "other threads load too early: no CTA barrier")
    ptx.require(ACQUIRE, TMA_LOAD, PROXY_FENCE, "TMA loads are not fenced")


def check_bounded(ptx: Ptx, acquire: str = ACQUIRE) -> None:
    """Every spin looks at the clock now and then, and no warp goes by what it alone has read there:
    one that parts from the others leaves them at a barrier.
    """
    polls = [poll for poll in ptx.find(acquire) if ptx.reach(poll, {poll}, set())]
    if not polls:
        raise Misordered("no poll spins")
    for poll in polls:
        if not _in_the_spin(ptx, poll, CLOCK):
            raise Misordered(f"a spin without a clock: {ptx.instructions[poll]!r}")
    clocks = {_registers(ptx.instructions[i])[0] for i in ptx.find(CLOCK)}
    known = _computed_from(ptx, clocks)
    for i in ptx.find(BRANCH):
        if known & {*_registers(ptx.instructions[i])}:
            raise Misordered(f"each warp goes by its own clock: {ptx.instructions[i]!r}")


def _computed_from(ptx: Ptx, registers: set[str]) -> set[str]:
    """These registers and all that follow from them. What has been through memory is what one
    thread has read, the same for all.
    """
    known, before = {*registers}, 0
    work = [ptx.instructions[i] for i in ptx.find(r"%") if not ptx.is_memory(i)]
    while len(known) > before:
        before = len(known)
        for text in work:
            if known & {*_registers(text)}:
                known |= {*_registers(_target(text))}
    return known


def _registers(text: str) -> list[str]:
    return re.findall(r"%[a-z]+\d+", text)


def _target(text: str) -> str:
    """What an instruction writes: its first operand, which may be several in braces."""
    return re.match(r"(?:@\S+\s+)?\S+\s*(\{[^}]*\}|[^,]*)", text)[1]


def check_gives_up(ptx: Ptx, acquire: str = ACQUIRE) -> None:
    """Every spin looks, now and then, whether another wait has run out of time."""
    for poll in ptx.find(acquire):
        if ptx.reach(poll, {poll}, set()) and not _in_the_spin(ptx, poll, LOOK):
            raise Misordered(f"a spin that never gives up: {ptx.instructions[poll]!r}")


def check_waits(ptx: Ptx, barrier: str = BARRIER) -> None:
    """Data is loaded after its signal, and every wait ends."""
    check_acquire(ptx, barrier)
    check_bounded(ptx)
    check_gives_up(ptx)


def _in_the_spin(ptx: Ptx, poll: int, pattern: str) -> list[int]:
    """What turns of this poll can pass. Outside lie other polls, the data, and records of waits."""
    outside = f"{ACQUIRE}|{ACQUIRE_GPU}|{LOAD}|{RECORD}"
    others = {*ptx.find(outside)} - {poll}
    return [
        one for one in ptx.find(pattern)
        if ptx.reach(poll, {one}, others) and ptx.reach(one, {poll}, others)
    ]  # fmt: skip


def check_needed(
    check: Callable[[Ptx], None], ptx: str, found: str, reason: str, put: str = ""
) -> None:
    """The check fails for the reason once all instructions of a kind are gone, or are `put`."""
    broken = re.sub(found if put else rf"({found})[^;\n]*", put, ptx)
    assert broken != ptx, f"there is no {found}"
    with pytest.raises(Misordered, match=reason):
        check(Ptx(broken))


# of the portable kernels; `hopper_order` has those of the others
CHECKS = {
    "ag_gemm": [check_waits],
    "gemm_rs": [check_release, check_count],
    "signalled_gemm": [check_release],
    "gathered_gemm": [check_waits],
    "reduce_received": [check_waits],
    "wait_sources": [check_bounded, check_gives_up],
    "rank_barrier": [check_bounded, check_gives_up],
}
