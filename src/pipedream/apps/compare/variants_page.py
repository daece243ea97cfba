"""A comparison of runs as a picture and as one page."""

import math
from collections.abc import Sequence
from html import escape

from pipedream.apps.compare.variants import ONE_WORKER, RecipeComparison, Variant, at_link
from pipedream.apps.report.charts import curve_svg
from pipedream.apps.report.html_tables import document, scroll, section, table


def comparison_svg(comparison: RecipeComparison, *, standalone: bool = True) -> str:
    """Returns the speed-up over one worker against the rate of the links; over one link, the losses."""
    if len(comparison.links) < 2:
        return _draw_losses(comparison, comparison.variants, standalone)
    links = [link for link in comparison.links if link]
    places = {link: -math.log(link.bytes_per_s) for link in links}  # slow links on the right
    if is_even := len({*places.values()}) < len(links):  # links of one rate
        places = {link: float(place) for place, link in enumerate(links)}
    curves: dict[str, list[tuple[float, float]]] = {variant.name: [] for variant in comparison.variants}
    for variant in comparison.variants:
        if variant.speed and (speed_up := comparison.compare_with(ONE_WORKER, variant)):
            curves[variant.name].append((places[variant.speed], speed_up))
    ranked = sorted(curves.items(), key=lambda curve: -curve[1][-1][1] if curve[1] else 0.0)
    return curve_svg(
        {f"{points[-1][1]:.2g}x {name}" if points else name: points for name, points in ranked},
        title=comparison.heading,
        width_px=860,
        height_px=max(360, 80 + 18 * len(curves)) if standalone else 360,
        x_label="links, in the order given" if is_even else "link rate, on a logarithmic axis",
        y_label=f"samples per second over those of {ONE_WORKER} alone; left of a name: over the slowest link",
        x_ticks={place: str(link) for link, place in places.items()},
        standalone=standalone,
    )


def comparison_page(comparison: RecipeComparison) -> str:
    """Returns the page: verdict, speed-ups, losses over each link, the table, and why figures are missing."""
    heads, *rows = comparison.table()
    figures = table("Runs", heads, [[escape(cell) for cell in row] for row in rows], words=3, show_caption=False)
    pictures = [_draw_losses(comparison, variants, standalone=False) for variants in comparison.links.values()]
    if len(pictures) > 1:
        pictures.insert(0, comparison_svg(comparison, standalone=False))
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in (*comparison.reasons(), *comparison.doubts()))
    body = f"<section>{scroll('Pictures', ''.join(pictures), 'fits')}</section>\n<section>{figures}</section>\n"
    body += section("Notes", f"<ul>{reasons}</ul>" if reasons else "")
    return document(comparison.heading, comparison.verdict, body)


def _draw_losses(comparison: RecipeComparison, variants: Sequence[Variant], standalone: bool) -> str:
    seconds = f"{'predicted' if comparison.delayed else 'measured'} seconds {at_link(variants[0].speed)}"
    return curve_svg(
        {variant.name: variant.loss_curve for variant in variants},
        title=f"{comparison.heading}: training loss",
        width_px=1180,
        height_px=max(300, 80 + 18 * len(variants)) if standalone else 300,
        x_label=seconds,
        standalone=standalone,
    )
