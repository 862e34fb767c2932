"""The pictures of docs/how: `python scripts/draw_pictures.py` writes them as SVG.

Widths of boxes show an order, not measured times. A white panel keeps them readable on any page.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

OUT = Path(__file__).parents[1] / "docs" / "how"
INK, FAINT = "#1f2933", "#6b7785"
LOCAL, REMOTE, MOVE, SUM, IDLE = "#bfe3c8", "#bcd4f2", "#f7d9a8", "#dccbf0", "#eef0f2"
WIDTH, LANE, LEFT = 780, 30, 118


class Picture:
    """Boxes, texts and arrows in a panel of `height`."""

    def __init__(self, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" font-family="Helvetica, Arial, sans-serif" '
            f'font-size="13" role="img" aria-label="{escape(title)}">',
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker>'
            "</defs>",
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" '
            'fill="#ffffff" stroke="#c9d0d8"/>',
        ]

    def text(self, x: float, y: float, text: str, color: str = INK, anchor: str = "start",
             bold: bool = False) -> None:  # fmt: skip
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{color}" text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )

    def box(self, x: float, y: float, width: float, color: str, text: str = "") -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{LANE - 4}" rx="3" '
            f'fill="{color}" stroke="{FAINT}" stroke-width="0.7"/>'
        )
        if text:
            self.text(x + width / 2, y + 18, text, anchor="middle")

    def lane(self, y: float, name: str, *boxes: tuple[float, float, str, str]) -> None:
        """A row of (begin, width, color, text) behind its name."""
        self.text(LEFT - 10, y + 18, name, FAINT, "end")
        for begin, width, color, text in boxes:
            self.box(LEFT + begin, y, width, color, text)

    def arrow(self, x0: float, y0: float, x1: float, y1: float, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<path d="M{x0:g} {y0:g}L{x1:g} {y1:g}" stroke="{INK}" stroke-width="1.2"{dash} '
            'fill="none" marker-end="url(#head)"/>'
        )

    def legend(self, y: float, *entries: tuple[str, str]) -> None:
        x = LEFT
        for color, text in entries:
            self.parts.append(
                f'<rect x="{x}" y="{y}" width="14" height="14" rx="2" fill="{color}" '
                f'stroke="{FAINT}" stroke-width="0.7"/>'
            )
            self.text(x + 20, y + 12, text, FAINT)
            x += 38 + round(6.6 * len(text))

    def save(self, name: str) -> None:
        (OUT / name).write_text("\n".join([*self.parts, "</svg>"]) + "\n", encoding="utf-8")


def patterns() -> None:
    """Both patterns on rank 0 of 4: the collective beside the GEMM, tile after tile."""
    p = Picture(470, "AG+GEMM and GEMM+RS on a time line, with NCCL and overlapped")
    p.text(18, 28, "AG+GEMM, rank 0 of 4", bold=True)
    p.lane(40, "NCCL", (0, 190, MOVE, "all-gather x"))
    p.lane(70, "SMs", (0, 190, IDLE, "idle"), (194, 420, REMOTE, "GEMM"))
    p.lane(120, "copy engines", *((n * 84, 80, MOVE, f"x of rank {n + 1}") for n in range(3)))
    tiles = ("local shard", "rows of rank 1", "rows of rank 2", "rows of rank 3")
    p.lane(150, "SMs", *((n * 106, 102, REMOTE if n else LOCAL, t) for n, t in enumerate(tiles)))
    for n in range(3):
        p.arrow(LEFT + n * 84 + 80, 147, LEFT + (n + 1) * 106 - 1, 158)
    p.text(LEFT + 436, 167, "saved", FAINT)
    p.arrow(LEFT + 614, 163, LEFT + 478, 163, dashed=True)

    p.text(18, 228, "GEMM+RS, rank 0 of 4", bold=True)
    p.lane(240, "SMs", (0, 420, REMOTE, "GEMM"), (424, 190, IDLE, "idle"))
    p.lane(270, "NCCL", (424, 190, MOVE, "reduce-scatter y"))
    tiles = ("tiles for rank 1", "for rank 2", "for rank 3", "local tiles")
    p.lane(320, "SMs", *((n * 106, 102, LOCAL if n == 3 else REMOTE, t) for n, t in
                         enumerate(tiles)), (424, 44, SUM, "sum"))  # fmt: skip
    p.lane(350, "copy engines", *((106 + n * 106, 80, MOVE, f"to rank {n + 1}") for n in range(3)))
    for n in range(3):
        p.arrow(LEFT + n * 106 + 103, 340, LEFT + n * 106 + 108, 353)
    p.text(LEFT + 482, 337, "saved", FAINT)
    p.arrow(LEFT + 614, 333, LEFT + 524, 333, dashed=True)
    p.legend(408, (LOCAL, "tiles of the local shard"), (REMOTE, "tiles of remote shards"),
             (MOVE, "communication"), (SUM, "sum over the ranks"))  # fmt: skip
    p.text(LEFT, 450, "time runs to the right; widths are a sketch", FAINT)
    p.save("patterns.svg")


def backward() -> None:
    """What a column and a row layer run in backward, and beside what."""
    p = Picture(366, "Backward of a column-parallel and of a row-parallel layer")
    p.text(18, 28, "column-parallel layer", bold=True)
    p.lane(
        40, "copy engines", (0, 150, MOVE, "gather x again"), (170, 200, MOVE, "push tiles of dx")
    )
    p.lane(100, "SMs", (0, 270, REMOTE, "dgrad: dx = dy w, by tiles"),
           (274, 270, LOCAL, "wgrad: dw += dyᵀ x"), (548, 90, SUM, "sum of dx"))  # fmt: skip
    p.arrow(LEFT + 148, 67, LEFT + 272, 98)
    p.arrow(LEFT + 368, 67, LEFT + 546, 98)
    p.text(LEFT, 152, "wgrad waits for the gathered x; it hides the rest of the scatter", FAINT)

    p.text(18, 200, "row-parallel layer", bold=True)
    p.lane(212, "copy engines", (0, 200, MOVE, "gather dy"))
    p.lane(242, "SMs", (0, 90, LOCAL, "local dy"), (94, 210, REMOTE, "dgrad: dx = dy w"),
           (308, 270, LOCAL, "wgrad: dw += dyᵀ x"))  # fmt: skip
    p.arrow(LEFT + 60, 239, LEFT + 93, 248)
    p.text(LEFT, 294, "wgrad reads the rows that dgrad has gathered: nothing travels twice", FAINT)
    p.legend(322, (MOVE, "communication"), (REMOTE, "dgrad"), (LOCAL, "wgrad, local rows"),
             (SUM, "sum over the ranks"))  # fmt: skip
    p.save("backward.svg")


def memory() -> None:
    """A channel's buffer over calls, and who may write into which half."""
    p = Picture(330, "Two halves of a channel's buffer, used in turn")
    p.text(18, 28, "one channel's symmetric buffer on rank 0", bold=True)
    p.lane(48, "half 0", (0, 200, REMOTE, "call 6: read"), (420, 200, REMOTE, "call 8: read"))
    p.lane(78, "half 1", (210, 200, REMOTE, "call 7: read"))
    p.lane(108, "captured part", (0, 620, IDLE, "replays of CUDA graphs only"))
    p.text(18, 172, "why rank 1 may write call 8 into half 0 of rank 0", bold=True)
    p.lane(186, "rank 0", (0, 200, LOCAL, "call 6 ends"), (210, 200, MOVE, "sends call 7"))
    p.lane(
        246,
        "rank 1",
        (210, 270, LOCAL, "call 7 waits for rank 0"),
        (490, 130, MOVE, "writes call 8"),
    )
    p.arrow(LEFT + 200, 199, LEFT + 209, 199)
    p.arrow(LEFT + 400, 213, LEFT + 440, 245)
    p.text(LEFT + 432, 230, "signal of call 7", FAINT)
    p.arrow(LEFT + 480, 259, LEFT + 489, 259)
    p.text(LEFT, 304, "the data signals are the credits: no barrier, no reset", FAINT)
    p.save("memory.svg")


def signals() -> None:
    """Data, then signal; wait, then load."""
    p = Picture(336, "A push, its signal, and the wait of a tile")
    p.text(18, 28, "call 7: rank 1 sends two communication tiles to rank 0", bold=True)
    p.lane(44, "rank 1", (0, 130, MOVE, "push tile 0"), (134, 76, SUM, "signal [A]"),
           (214, 130, MOVE, "push tile 1"), (348, 76, SUM, "signal [A]"))  # fmt: skip
    p.lane(124, "rank 0", (0, 230, LOCAL, "tiles of the local shard"),
           (234, 170, REMOTE, "GEMM of tile 0"),
           (408, 60, IDLE, "wait"), (472, 150, REMOTE, "GEMM of tile 1"))  # fmt: skip
    p.arrow(LEFT + 172, 71, LEFT + 232, 122)
    p.arrow(LEFT + 386, 71, LEFT + 470, 122)
    p.text(LEFT + 440, 92, "the slot gets 7 after the data", FAINT)
    p.text(18, 196, "slots of rank 0, one for each (source rank, communication tile)", bold=True)
    cells = (
        ("1, 0", "7", "ready"),
        ("1, 1", "6", "waits"),
        ("2, 0", "7", "ready"),
        ("2, 1", "7", "ready"),
    )
    p.text(LEFT - 10, 228, "slot", FAINT, "end")
    p.text(LEFT - 10, 256, "epoch", FAINT, "end")
    for n, (slot, epoch, state) in enumerate(cells):
        p.text(LEFT + n * 120 + 55, 228, slot, FAINT, "middle")
        p.box(LEFT + n * 120, 238, 110, IDLE if state == "waits" else LOCAL, epoch)
        p.text(LEFT + n * 120 + 55, 282, state, FAINT, "middle")
    p.text(LEFT, 316, "a tile of call 7 loads its rows when slot - 7 >= 0", FAINT)
    p.save("signals.svg")


def expert_parallel() -> None:
    """Both operations on rank 0 of 2, beside what a library does one after the other."""
    p = Picture(400, "a2a_gemm and gemm_a2a on a time line, beside all-to-all and grouped GEMM")
    p.text(18, 28, "all-to-all, then grouped GEMM, rank 0 of 2", bold=True)
    p.lane(40, "host", (0, 90, IDLE, "waits: splits"))
    p.lane(70, "NCCL", (94, 150, MOVE, "all-to-all"))
    p.lane(100, "SMs", (248, 60, IDLE, "sort"), (312, 300, REMOTE, "GEMMs of all experts"))
    p.text(18, 168, "a2a_gemm", bold=True)
    p.lane(180, "a few CTAs", (0, 56, MOVE, "counts"), (60, 130, MOVE, "push to rank 1"),
           (194, 260, REMOTE, "as the others"))  # fmt: skip
    p.lane(210, "other CTAs", (60, 180, LOCAL, "local rows"), (244, 210, REMOTE, "rows of rank 1"))
    p.text(18, 268, "gemm_a2a", bold=True)
    p.lane(280, "SMs", (0, 56, MOVE, "counts"), (60, 190, REMOTE, "tiles for rank 1"),
           (254, 180, LOCAL, "local tiles"), (438, 70, SUM, "copy"))  # fmt: skip
    p.lane(310, "NVLink", (84, 190, MOVE, "into their rows there"))
    p.legend(352, (LOCAL, "local rows"), (REMOTE, "rows of other ranks"), (MOVE, "communication"))
    p.text(LEFT, 386, "time runs to the right; widths are a sketch", FAINT)
    p.save("expert_parallel.svg")


def signalled_experts() -> None:
    """Both operations in two bands of experts, by plain all-to-alls."""
    p = Picture(430, "a2a_gemm and gemm_a2a of experts in two bands, by plain all-to-alls")
    p.text(18, 28, "gemm_a2a, one rank of two", bold=True)
    p.lane(44, "host", (0, 80, IDLE, "waits: counts"))
    p.lane(84, "GEMM, 124 SMs", (84, 110, REMOTE, "band 0"), (198, 110, REMOTE, "band 1"),
           (312, 220, LOCAL, "own rows"))  # fmt: skip
    p.lane(124, "stream, no SM", (84, 110, IDLE, "wait"))
    p.lane(164, "NCCL, 8 SMs", (206, 140, MOVE, "all-to-all 0"), (358, 140, MOVE, "all-to-all 1"))
    p.arrow(LEFT + 194, 111, LEFT + 206, 162)
    p.arrow(LEFT + 308, 111, LEFT + 358, 162)
    p.text(LEFT + 214, 140, "count [D]", FAINT)
    p.text(18, 224, "a2a_gemm", bold=True)
    p.lane(240, "host", (0, 80, IDLE, "waits: counts"))
    p.lane(280, "NCCL, 8 SMs", (84, 140, MOVE, "all-to-all 0"), (228, 140, MOVE, "all-to-all 1"))
    p.lane(320, "GEMM, 124 SMs", (84, 220, LOCAL, "own rows"), (308, 110, REMOTE, "band 0"),
           (422, 110, REMOTE, "band 1"))  # fmt: skip
    p.arrow(LEFT + 224, 307, LEFT + 308, 318)
    p.arrow(LEFT + 368, 307, LEFT + 422, 318)
    p.legend(372, (LOCAL, "local rows"), (REMOTE, "rows of other ranks"), (MOVE, "communication"))
    p.text(LEFT, 414, "time runs to the right; widths are a sketch", FAINT)
    p.save("signalled_experts.svg")


def signalled() -> None:
    """A GEMM in bands, a stream that waits for counts, collectives beside."""
    p = Picture(304, "A GEMM in three bands, and the collective of each")
    p.text(18, 28, "one rank of two: GEMM+RS in three bands of rows", bold=True)
    p.lane(44, "GEMM, 124 SMs", (0, 200, LOCAL, "band 0"), (204, 200, LOCAL, "band 1"),
           (408, 100, LOCAL, "band 2"))  # fmt: skip
    p.lane(104, "stream, no SM", (0, 200, IDLE, "wait for 576 tiles"),
           (308, 96, IDLE, "wait"))  # fmt: skip
    p.lane(164, "NCCL, 8 SMs", (214, 90, MOVE, "RS of 0"), (418, 90, MOVE, "RS of 1"),
           (522, 50, MOVE, "2"))  # fmt: skip
    for begin, end in ((200, 214), (404, 418), (508, 522)):
        p.arrow(LEFT + begin, 71, LEFT + end, 162)
    p.text(LEFT + 212, 100, "count [D]", FAINT)
    p.text(18, 224, "memory of band 0", bold=True)
    p.lane(238, "", (0, 200, LOCAL, "rows 0-767 of shard 0"),
           (204, 200, REMOTE, "rows 0-767 of shard 1"))  # fmt: skip
    p.text(LEFT, 286, "one reduce-scatter of it gives rows 0-767 of each rank's shard", FAINT)
    p.save("signalled.svg")


def own_kernel() -> None:
    """Tiles of the all-gather + RMSNorm of docs/own_kernel.md on two ranks."""
    p = Picture(306, "All-gather + RMSNorm: tiles are put and signalled first, awaited afterwards")
    p.text(18, 28, "all-gather + RMSNorm on two ranks, four tiles of rows each", bold=True)
    p.lane(44, "rank 0, SMs", *((n * 76, 72, LOCAL, f"tile {n}") for n in range(4)),
           *((304 + n * 76, 72, REMOTE, f"tile {4 + n}") for n in range(4)))  # fmt: skip
    p.lane(94, "NVLink", *((20 + n * 76, 64, MOVE, f"put {n}") for n in range(4)))
    p.lane(144, "rank 1, SMs", *((n * 76, 72, LOCAL, f"tile {4 + n}") for n in range(4)),
           *((304 + n * 76, 72, REMOTE, f"tile {n}") for n in range(4)))  # fmt: skip
    for n in range(4):
        p.arrow(LEFT + n * 76 + 12, 71, LEFT + n * 76 + 26, 92)
        p.arrow(LEFT + n * 76 + 84, 121, LEFT + 304 + n * 76, 142)
    p.text(18, 208, "what a tile does", bold=True)
    p.lane(220, "own tile", (0, 150, MOVE, "put_tile"), (154, 150, MOVE, "signal_tile"),
           (308, 190, LOCAL, "normalise, store y"))  # fmt: skip
    p.lane(250, "tile of a peer", (0, 150, IDLE, "wait_tile"), (154, 150, REMOTE, "load"),
           (308, 190, REMOTE, "normalise, store y"))  # fmt: skip
    p.text(LEFT, 292, "puts of rank 1 to rank 0 are not drawn; widths are a sketch", FAINT)
    p.save("own_kernel.svg")


if __name__ == "__main__":
    every = (
        patterns, backward, memory, signals, signalled, expert_parallel, signalled_experts,
        own_kernel,
    )  # fmt: skip
    for draw in every:
        draw()
