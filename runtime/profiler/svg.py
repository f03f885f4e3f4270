"""Small charts as inline SVG text. Colours are CSS classes and variables of the page around them.

Every mark carries a ``<title>``, which browsers show as a tooltip.
"""

import math
from collections.abc import Callable, Sequence
from html import escape

WIDTH, HEIGHT = 560, 250
# The edges of the plotted area.
LEFT, RIGHT, TOP, BOTTOM = 52, WIDTH - 16, 14, HEIGHT - 42


def ticks(high: float, count: int = 5) -> list[float]:
    """Return round values from zero that cover ``high``. Example: 7.2 -> 0, 2, 4, 6, 8."""
    high = high if high > 0 else 1
    power = 10 ** math.floor(math.log10(high / count))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if high / (m * power) <= count)
    return [round(index * step, 10) for index in range(math.ceil(high / step - 1e-9) + 1)]


def bars(values: Sequence[float], labels: Sequence[str], *, x_title: str, y_title: str, top: float) -> str:
    """Draw upright bars from zero, one a label; ``top`` ends the axis; values stand on the bars."""
    y_of, parts = _axes(ticks(top), x_title, y_title)
    slot = (RIGHT - LEFT) / len(values)
    width = min(slot * 0.7, 48)
    for index, (value, label) in enumerate(zip(values, labels, strict=True)):
        middle, y = LEFT + slot * (index + 0.5), y_of(value)
        place = {"x": middle - width / 2, "y": y, "width": width, "height": BOTTOM - y, "rx": 3}
        parts.append(_mark("rect", "mark", f"{label}: {value:.3f}", **place))
        if slot >= 30:  # narrower bars leave no room for numbers
            parts.append(_text(middle, y - 5, f"{value:.2f}", "value"))
        parts.append(_text(middle, BOTTOM + 17, label))
    return _svg(parts, HEIGHT, y_title)


def line(xs: Sequence[float], ys: Sequence[float], *, x_title: str, y_title: str) -> str:
    """Draw a line with a labelled marker at each point; both axes are linear, y starts at zero."""
    y_of, parts = _axes(ticks(max(ys)), x_title, y_title)
    scale = (RIGHT - LEFT - 24) / (max(xs) or 1)
    points = [(LEFT + 12 + x * scale, y_of(y)) for x, y in zip(xs, ys, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts.append(f'<polyline class="line" points="{path}"/>')
    last_label = -math.inf
    for (x, y), x_value, y_value in zip(points, xs, ys, strict=True):
        parts.append(_mark("circle", "dot", f"{x_value:g}: {y_value:.3f}", cx=x, cy=y, r=4.5))
        if x - last_label >= 26:  # neighbours that would overlap stay in the table
            parts.append(_text(x, max(y - 10, TOP - 2), f"{y_value:.1f}", "value"))
            parts.append(_text(x, BOTTOM + 17, f"{x_value:g}"))
            last_label = x
    return _svg(parts, HEIGHT, y_title)


def dots(values: Sequence[float], titles: Sequence[str], *, x_title: str, y_title: str, median: float) -> str:
    """Draw one dot a value, in the given order, with lines at 1 and at the median."""
    y_of, parts = _axes(ticks(max(*values, 1.0)), x_title, y_title)
    slot = (RIGHT - LEFT) / len(values)
    radius = max(2.5, min(5.0, slot * 0.4))
    parts += [_rule(LEFT, RIGHT, y_of(1), y_of(1), "even")]
    parts += [_rule(LEFT, RIGHT, y_of(median), y_of(median), "median")]
    for index, (value, title) in enumerate(zip(values, titles, strict=True)):
        parts.append(_mark("circle", "dot", title, cx=LEFT + slot * (index + 0.5), cy=y_of(value), r=radius))
    return _svg(parts, HEIGHT, y_title)


def stacked(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, x_title: str) -> str:
    """Draw horizontal bars, each a stack of (class, value) parts; a part's class gives its colour."""
    left, thick, gap = 84, 26, 14
    bottom = TOP + len(rows) * (thick + gap) - 6
    totals = [sum(value for _, value in stack) for _, stack in rows]
    marks = ticks(max(totals))
    scale = (RIGHT - left - 44) / marks[-1]
    parts = []
    for mark in marks:
        x = left + mark * scale
        parts += [_rule(x, x, TOP, bottom, "grid"), _text(x, bottom + 15, f"{mark:g}")]
    for index, ((label, stack), total) in enumerate(zip(rows, totals, strict=True)):
        x, y = float(left), TOP + index * (thick + gap) + gap / 2
        parts.append(_text(left - 8, y + thick / 2 + 4, label, "end"))
        for name, value in stack:
            width = value * scale
            # A hairline of the page's colour keeps neighbours apart.
            place = {"x": x, "y": y, "width": max(width - 1.5, width / 2), "height": thick}
            parts.append(_mark("rect", f"part {name}", f"{label}, {name}: {value:.3f} ms", **place))
            x += width
        parts.append(_text(x + 6, y + thick / 2 + 4, f"{total:.2f}", "value start"))
    parts.append(_text((left + RIGHT) / 2, bottom + 34, x_title, "title"))
    return _svg(parts, bottom + 40, x_title)


def _axes(marks: Sequence[float], x_title: str, y_title: str) -> tuple[Callable[[float], float], list[str]]:
    """Return the function from value to y, and the elements of grid and titles; the axis begins at zero."""

    def y_of(value: float) -> float:
        return BOTTOM - value / marks[-1] * (BOTTOM - TOP)

    parts = []
    for mark in marks:
        y = y_of(mark)
        parts += [_rule(LEFT, RIGHT, y, y, "grid"), _text(LEFT - 8, y + 4, f"{mark:g}", "end")]
    turned = f'search="translate(13 {(BOTTOM + TOP) / 2:.1f}) rotate(-90)"'
    parts.append(f'<text class="title" {turned}>{escape(y_title)}</text>')
    return y_of, [*parts, _text((LEFT + RIGHT) / 2, HEIGHT - 6, x_title, "title")]


def _rule(x1: float, x2: float, y1: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _mark(tag: str, style: str, title: str, **place: float) -> str:
    where = " ".join(f'{name}="{value:.2f}"' for name, value in place.items())
    return f'<{tag} class="{escape(style)}" {where}><title>{escape(title)}</title></{tag}>'


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(parts: Sequence[str], height: float, label: str) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">{body}</svg>'
