"""Just enough SVG: boxes, lines with arrows, text. The same calls give the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

X, W, Y, SUMS = "#2563a8", "#b4600f", "#2f7d43", "#7b3fa0"
"""Activations, weights, results, sums."""

W2 = "#a8324e"
"""A second stream of weights."""

INK, QUIET, RULE, PAPER = "#1f2328", "#59636e", "#c4cbd3", "#ffffff"
"""Text, text beside it, outlines, background."""

TINTS = {W2: "#f8dde2", X: "#dbe9f8", W: "#fbe6cf", Y: "#dcf1e0", SUMS: "#eddff5", QUIET: "#eef1f4"}
"""Fills to go with the colours."""

FONT = "Helvetica, Arial, sans-serif"


def number(value: float) -> str:
    """A coordinate."""
    return f"{value:.1f}".removesuffix(".0")


class Picture:
    """A picture of so many pixels, its title for those who can't see it."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="{FONT}" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
        ]
        self._arrows: list[str] = []
        self._body: list[str] = []

    def render(self) -> str:
        """The file's text."""
        marks = [
            f'<marker id="{self._mark(colour)}" viewBox="0 0 8 8" refX="6.5" refY="4" markerWidth="7" markerHeight="7" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0.5 0.5 7 4 0.5 7.5z" fill="{colour}"/></marker>'
            for colour in self._arrows
        ]
        return "\n".join([*self._head, "<defs>", *marks, "</defs>", *self._body, "</svg>", ""])

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = PAPER,
        stroke: str = RULE,
        radius: float = 4,
        dashed: bool = False,
    ) -> None:
        """A rectangle."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._body.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" '
            f'rx="{number(radius)}" fill="{fill}" stroke="{stroke}"{dash}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        said: str,
        *,
        size: float = 11,
        colour: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """A line of text whose baseline starts, ends or is centred at (x, y); ``anchor`` is start, end or middle."""
        weight = ' font-weight="600"' if bold else ""
        self._body.append(
            f'<text x="{number(x)}" y="{number(y)}" font-size="{number(size)}" fill="{colour}" '
            f'text-anchor="{anchor}"{weight}>{escape(said)}</text>'
        )

    def line(
        self,
        points: Sequence[tuple[float, float]],
        colour: str,
        *,
        width: float = 1.8,
        arrow: bool = False,
        dashed: bool = False,
        bridge: bool = False,
    ) -> None:
        """Lines from point to point; ``bridge`` clears what they cross."""
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        if bridge:
            self._body.append(f'<polyline points="{path}" fill="none" stroke="{PAPER}" stroke-width="{width + 4}"/>')
        mark, dash = "", ' stroke-dasharray="4 3"' if dashed else ""
        if arrow:
            if colour not in self._arrows:
                self._arrows.append(colour)
            mark = f' marker-end="url(#{self._mark(colour)})"'
        self._body.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{number(width)}" '
            f'stroke-linejoin="round"{dash}{mark}/>'
        )

    def dot(self, x: float, y: float, colour: str) -> None:
        """Where a line branches."""
        self._body.append(f'<circle cx="{number(x)}" cy="{number(y)}" r="2.6" fill="{colour}"/>')

    def card(self, x: float, y: float, width: float, colour: str, title: str, lines: Sequence[str]) -> None:
        """A box of text with a coloured edge; 22 pixels high and 16 more a line."""
        height = 28 + 16 * len(lines)
        self.box(x, y, width, height, fill=TINTS.get(colour, PAPER), stroke=TINTS.get(colour, RULE))
        self._body.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="4" height="{number(height)}" rx="2" fill="{colour}"/>'
        )
        self.text(x + 14, y + 18, title, size=12.5, colour=colour, bold=True)
        for i, said in enumerate(lines):
            self.text(x + 14, y + 36 + 16 * i, said, size=11)

    @staticmethod
    def _mark(colour: str) -> str:
        return f"arrow{colour[1:]}"
