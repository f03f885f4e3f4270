"""The reliability diagram, as an SVG text."""

from collections.abc import Mapping, Sequence

from benchmarks.plot_style import INK, add_legend, looks, panels, svg_text


def reliability_plot(curves: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Share accepted against mean psi, both logarithmic, one line a name; the diagonal is right.

    curves: name -> bins of ``reliability.reliability``. A bin of which nothing was accepted is drawn
    hollow at half an acceptance, where a logarithm exists.
    """
    styles = looks(list(curves))
    with panels(["Are the draft's probabilities right?"]) as (figure, (axis,)):
        low = 1.0
        for name, bins in curves.items():
            psi = [part["psi"] for part in bins]
            shares = [part["accepted"] or 0.5 / part["count"] for part in bins]
            axis.plot(psi, shares, **{**styles[name], "marker": ""})
            for x, y, part in zip(psi, shares, bins, strict=True):
                face = styles[name]["color"] if part["accepted"] else "white"
                axis.plot(x, y, **{**styles[name], "linestyle": ""}, markerfacecolor=face)
            low = min(low, *psi, *shares)
        axis.set(xscale="log", yscale="log", xlim=(low / 1.5, 1.3), ylim=(low / 1.5, 1.3))
        axis.plot([low / 1.5, 1], [low / 1.5, 1], color=INK, linewidth=0.8, linestyle=":", zorder=0)
        axis.set_xlabel("mean psi of a tenth of the nodes")
        axis.set_ylabel("share accepted")
        add_legend(figure, styles)
        return svg_text(figure)
