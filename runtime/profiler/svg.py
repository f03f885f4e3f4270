"""Small charts as inline SVG text. Colours are CSS classes and variables of the page around them.

Every mark carries a ``<title>``, which browsers show as a tooltip.
"""

import math
from collections.abc import Callable, Sequence
from html import escape

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 14, 42


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values that cover ``low`` to ``high``. Example: 0, 7.2 -> 0, 2, 4, 6, 8."""
    high = high if high > low else low + 1
    span = high - low
    power = 10 ** math.floor(math.log10(span / count))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if span / (m * power) <= count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 10) for index in range(first, last + 1)]


def bars(values: Sequence[float], labels: Sequence[str], *, x_title: str, y_title: str, top: float) -> str:
    """Upright bars from zero, one a label; ``top`` ends the axis; values are written on the bars."""
    y_of, parts = _y_axis(ticks(0, top), y_title)
    slot = (WIDTH - LEFT - RIGHT) / max(len(values), 1)
    width = min(slot * 0.7, 48)
    for index, (value, label) in enumerate(zip(values, labels, strict=True)):
        middle, y = LEFT + slot * (index + 0.5), y_of(value)
        parts.append(
            f'<rect class="mark" x="{middle - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{y_of(0) - y:.1f}" rx="3"><title>{escape(label)}: {value:.3f}</title></rect>'
        )
        parts.append(_text(middle, y - 5, f"{value:.2f}", "value") if slot >= 30 else "")
        parts.append(_text(middle, HEIGHT - BOTTOM + 17, label))
    return _svg([*parts, _x_title(x_title)], HEIGHT, y_title)


def line(xs: Sequence[float], ys: Sequence[float], *, x_title: str, y_title: str) -> str:
    """A line with a labelled marker at each point; both axes are linear, y starts at zero."""
    y_of, parts = _y_axis(ticks(0, max(ys)), y_title)
    scale = (WIDTH - LEFT - RIGHT - 24) / (max(xs) or 1)
    points = [(LEFT + 12 + x * scale, y_of(y)) for x, y in zip(xs, ys, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts.append(f'<polyline class="line" points="{path}"/>')
    last_label = -math.inf
    for (x, y), x_value, y_value in zip(points, xs, ys, strict=True):
        title = f"{x_value:g}: {y_value:.3f}"
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4.5"><title>{title}</title></circle>')
        if x - last_label >= 26:  # neighbours that would overlap stay in the table
            parts.append(_text(x, y - 10, f"{y_value:.1f}", "value"))
            parts.append(_text(x, HEIGHT - BOTTOM + 17, f"{x_value:g}"))
            last_label = x
    return _svg([*parts, _x_title(x_title)], HEIGHT, y_title)


def dots(values: Sequence[float], titles: Sequence[str], *, x_title: str, y_title: str, median: float) -> str:
    """One dot a value, in the given order, with lines at 1 and at the median."""
    y_of, parts = _y_axis(ticks(0, max(*values, 1.0)), y_title)
    slot = (WIDTH - LEFT - RIGHT) / len(values)
    right = WIDTH - RIGHT
    for value, name in ((1.0, "even"), (median, "median")):
        y = y_of(value)
        parts.append(f'<line class="{name}" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
    radius = max(2.5, min(5.0, slot * 0.4))
    for index, (value, title) in enumerate(zip(values, titles, strict=True)):
        parts.append(
            f'<circle class="dot" cx="{LEFT + slot * (index + 0.5):.1f}" cy="{y_of(value):.1f}" '
            f'r="{radius:.1f}"><title>{escape(title)}</title></circle>'
        )
    parts.append(_text(LEFT + 6, y_of(median) - 6, f"median {median:.2f}x", "value start"))
    return _svg([*parts, _x_title(x_title)], HEIGHT, y_title)


def stacked(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, x_title: str) -> str:
    """Lying bars, each a stack of (class, value) parts; a part's class gives its colour."""
    left, thick, gap = 84, 26, 14
    height = TOP + len(rows) * (thick + gap) + BOTTOM - 8
    bottom = height - BOTTOM + 2
    marks = ticks(0, max(sum(value for _, value in stack) for _, stack in rows))
    scale = (WIDTH - left - RIGHT - 44) / marks[-1]
    parts = []
    for mark in marks:
        x = left + mark * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 15, f"{mark:g}"))
    for index, (label, stack) in enumerate(rows):
        y, x = TOP + index * (thick + gap) + gap / 2, float(left)
        parts.append(_text(left - 8, y + thick / 2 + 4, label, "end"))
        for name, value in stack:
            width = value * scale
            # A hairline of the page's colour keeps neighbours apart.
            inner = max(width - 1.5, width / 2)
            parts.append(
                f'<rect class="part {escape(name)}" x="{x:.2f}" y="{y}" width="{inner:.2f}" '
                f'height="{thick}"><title>{escape(label)}, {escape(name)}: {value:.3f} ms</title></rect>'
            )
            x += width
        total = sum(value for _, value in stack)
        parts.append(_text(x + 6, y + thick / 2 + 4, f"{total:.2f}", "value start"))
    parts.append(_text((left + WIDTH - RIGHT) / 2, height - 6, x_title, "title"))
    return _svg(parts, height, x_title)


def _y_axis(marks: Sequence[float], title: str) -> tuple[Callable[[float], float], list[str]]:
    """(value -> y, the axis' elements)."""
    span = marks[-1] - marks[0]

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - (value - marks[0]) / span * (HEIGHT - TOP - BOTTOM)

    parts = []
    for mark in marks:
        y = y_of(mark)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{mark:g}", "end"))
    middle = (HEIGHT - BOTTOM + TOP) / 2
    parts.append(
        f'<text class="title" transform="translate(13 {middle:.1f}) rotate(-90)">{escape(title)}</text>'
    )
    return y_of, parts


def _x_title(text: str) -> str:
    return _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, text, "title")


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(parts: Sequence[str], height: float, label: str) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">{body}</svg>'
