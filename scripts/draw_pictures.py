"""The pictures of docs/pictures: `python scripts/draw_pictures.py` writes them as SVG.

Widths of boxes in sketches show an order, not measured times; `draw_charts.py` has the charts. A
white panel keeps them readable on any page.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

OUT = Path(__file__).parents[1] / "docs" / "pictures"
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
    p.lane(44, "rank 1", (0, 130, MOVE, "push tile 0"), (134, 76, SUM, "signal"),
           (214, 130, MOVE, "push tile 1"), (348, 76, SUM, "signal"))  # fmt: skip
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


def own_kernel() -> None:
    """Tiles of the all-gather + RMSNorm of docs/extend.md on two ranks."""
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


PICTURES = (patterns, memory, signals, own_kernel)


if __name__ == "__main__":
    for draw in PICTURES:
        draw()
